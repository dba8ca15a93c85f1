"""Texts by which tokenizers are compared: news, Korean, code, maths and science, all written for this."""

from __future__ import annotations

NEWS = """\
The harbour town of Merrow voted on Tuesday to reopen its old tramway, ending eleven years of \
argument about who should pay for it. The council approved $48.6 million over four years by 23 votes \
to 17, after a debate that ran past midnight and filled the public gallery twice.

"We have spent more on studies than the first kilometre will cost," said deputy mayor Ilse \
Vantongeren, who led the campaign. Opponents, most of them from the northern wards, said the line \
would serve visitors rather than the people who live there. A poll published last week by the Merrow \
Courier put support at 52%, with 31% against and the rest undecided.

Work on the depot is to begin in March. Engineers expect to replace 9,400 sleepers and to widen two \
bridges, one of which has been closed to lorries since 2017. The first cars, ordered second-hand \
from a city in Portugal, should run between the ferry terminal and the university by the autumn of \
next year; tickets will cost $1.80, and children under twelve will travel free.

Shares in the firm that won the contract rose 3.4 percent on Wednesday morning. Its chief executive \
declined to comment on reports that a rival bidder would challenge the award in court.
"""

KOREAN = """\
작은 항구 도시에 첫눈이 내린 것은 십일월의 마지막 날이었다. 새벽 시장의 상인들은 좌판 위에 쌓인 눈을 \
털어 내며 서로의 안부를 물었고, 아이들은 학교에 가는 것도 잊은 채 골목마다 눈사람을 세웠다. 버스는 \
평소보다 이십 분쯤 늦게 도착했지만 아무도 불평하지 않았다.

도서관의 김 선생님은 창가에 앉아 오래된 신문을 정리하고 있었다. 1978년의 기사에는 지금은 사라진 \
전차와 극장의 사진이 실려 있었다. "그때는 모두가 서로의 이름을 알았지요." 그는 웃으며 말했다. 사진 \
속의 사람들은 두꺼운 외투를 입고 같은 방향을 바라보고 있었는데, 무엇을 보고 있었는지는 어디에도 적혀 \
있지 않았다.

점심 무렵 눈이 그치자 바다 위로 햇빛이 쏟아졌다. 등대까지 이어지는 길은 아직 미끄러웠으나, 시청은 \
오후 세 시까지 제설 작업을 마치겠다고 밝혔다. 내일 아침 기온은 영하 4도까지 내려갈 것으로 예상되며, \
주말에는 다시 맑은 날씨가 이어질 것이라고 기상청은 전했다.
"""

CODE = '''\
from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(order=True)
class Visit:
    cost: float
    place: str = field(compare=False)
    came_from: str | None = field(default=None, compare=False)


def shortest_paths(roads: list[tuple[str, str, float]], start: str) -> dict[str, tuple[float, str | None]]:
    """Cheapest way from `start` to every place that can be reached (Dijkstra, 1959)."""
    neighbours: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for left, right, length in roads:
        if length < 0:
            raise ValueError(f"negative length between {left!r} and {right!r}: {length}")
        neighbours[left].append((right, length))
        neighbours[right].append((left, length))

    best: dict[str, tuple[float, str | None]] = {}
    queue = [Visit(0.0, start)]
    while queue:
        visit = heapq.heappop(queue)
        if visit.place in best:
            continue  # an older, dearer entry
        best[visit.place] = (visit.cost, visit.came_from)
        for place, length in neighbours[visit.place]:
            if place not in best:
                heapq.heappush(queue, Visit(visit.cost + length, place, visit.place))
    return best


if __name__ == "__main__":
    ROADS = [("A", "B", 4.0), ("A", "C", 2.5), ("C", "B", 1.0), ("B", "D", 5.0), ("C", "D", 8.0)]
    for place, (cost, came_from) in sorted(shortest_paths(ROADS, "A").items()):
        print(f"{place}: {cost:5.1f} via {came_from or '-'}")
'''

MATHS = r"""
\begin{theorem}
Let $(a_n)_{n \ge 1}$ be a decreasing sequence of positive real numbers. Then $\sum_{n=1}^{\infty} a_n$
converges if and only if $\sum_{k=0}^{\infty} 2^k a_{2^k}$ converges.
\end{theorem}

\begin{proof}
Write $S_m = \sum_{n=1}^{2^m - 1} a_n$ and $T_m = \sum_{k=0}^{m-1} 2^k a_{2^k}$. The terms with
$2^k \le n < 2^{k+1}$ number exactly $2^k$, and since the sequence decreases each of them satisfies
$a_{2^{k+1}} \le a_n \le a_{2^k}$. Summing over $k = 0, 1, \dots, m-1$ gives
\[
    \tfrac{1}{2}\,(T_{m+1} - a_1) \;=\; \sum_{k=0}^{m-1} 2^k a_{2^{k+1}} \;\le\; S_m \;\le\; T_m .
\]
Both $S_m$ and $T_m$ increase with $m$, so one of them is bounded exactly when the other is.
\end{proof}

\begin{example}
With $a_n = n^{-p}$ we get $2^k a_{2^k} = 2^{(1-p)k}$, a geometric series of ratio $r = 2^{1-p}$. It converges
for $r < 1$, that is for $p > 1$, and then its sum is $\frac{1}{1 - 2^{1-p}}$; for $p = 2$ this is $2$, while
$\sum_{n} n^{-2} = \pi^2/6 \approx 1.644934$. For $p = 1$ every term equals $1$, and the harmonic series
diverges: $H_{2^m} \ge 1 + \tfrac{m}{2}$.
\end{example}

Check by hand: $17 \times 24 = 408$, $408 / 16 = 25.5$, and $\sqrt{650.25} = 25.5$.
"""

SCIENCE = """\
Photosynthesis begins when a pigment absorbs a photon. In the thylakoid membrane of a chloroplast, \
chlorophyll a absorbs most strongly near 430 nm and 662 nm; the energy is passed from one antenna \
molecule to the next within about a picosecond until it reaches a reaction centre. There an electron \
is moved to an acceptor, and the hole it leaves is filled by splitting water: 2 H2O → O2 + 4 H+ + 4 \
e-. Four photons are needed for each molecule of oxygen at photosystem II, and four more at \
photosystem I.

The protons that are released, together with those pumped by the cytochrome b6f complex, build a \
gradient of roughly three pH units across the membrane. ATP synthase lets them flow back and makes \
one molecule of ATP for every 14/3 protons, as its ring of c-subunits has fourteen members in \
spinach. NADP+ reductase uses the electrons to make NADPH.

In the stroma, ribulose-1,5-bisphosphate carboxylase/oxygenase (RuBisCO) fixes carbon dioxide at a \
mere 3 to 10 molecules per second. About one reaction in four goes astray with oxygen instead, which \
costs the plant energy; C4 grasses such as maize concentrate CO2 around the enzyme and avoid most of \
that loss. A hectare of maize can bind 20 t of carbon dioxide in a single summer (σ ≈ 3 t between \
fields), at temperatures of 25–35 °C.
"""

SAMPLES = {"news": NEWS, "korean": KOREAN, "code": CODE, "maths": MATHS, "science": SCIENCE}
