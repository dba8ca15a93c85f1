from __future__ import annotations

import pytest

from endstop.runtime.trace import Trace, TraceStep
from endstop.view.document import TraceDocument

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
TOKENS = [
    "Thank",
    " you",
    "谢",
    " 👩‍🚀",
    "\n",
    HOSTILE,
    " $x_1$ \\frac",
    " \u202egpj\x1b[31m",
    " forced",
    "<|im_end|>",
]
P_STOPS = [1e-9, 0.0, 1e-5, 2e-4, 0.04, 0.3, 1e-12, 1e-20, None, 0.97]


@pytest.fixture
def document() -> TraceDocument:
    """Ten tokens: Chinese, an emoji, markup, a control sequence, a forced token, a terminator."""
    steps = [
        TraceStep(
            token_id=100 + i if token != "<|im_end|>" else 2,
            token=token,
            forced=p is None,
            probability=None if p is None else 0.5,
            entropy=None if p is None else 1.25,
            p_stop=p,
            best_stop=None if p is None else 2,
            best_stop_rank=None if p is None else 1 if p > 0.5 else 9,
            visible=21 + i,
            computed=20 + i,
            pending=1,
        )
        for i, (token, p) in enumerate(zip(TOKENS, P_STOPS, strict=True))
    ]
    return TraceDocument(
        Trace(20, [2], steps),
        list(TOKENS),
        "".join(TOKENS[:-1]),
        model='my "model" <b>',
        prompt=f"<|im_start|>user\n{HOSTILE}",
        finish_reason="stop",
        stop_kind="turn_end",
        stop_reason=2,
        tokens_per_second=41.25,
        params={"temperature": 0.0, "stop": ["</body>"]},
        stop_texts={2: "<|im_end|>"},
    )
