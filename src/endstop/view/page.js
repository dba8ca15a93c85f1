"use strict";
(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const readout = document.querySelector(".readout");
  const rows = all("tbody tr");
  const columns = all("thead th").map((cell) => cell.textContent);
  let current = -1;

  const select = (step, scroll) => {
    if (step < 0 || step >= rows.length) return;
    current = step;
    for (const element of all(".on")) element.classList.remove("on");
    for (const element of all(`[data-step="${step}"]`)) element.classList.add("on");
    readout.textContent = [...rows[step].cells]
      .map((cell, index) => `${columns[index]} ${cell.textContent}`)
      .join("   ");
    if (scroll) {
      const dot = document.querySelector(`svg:not([hidden]) [data-step="${step}"]`);
      if (dot) dot.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
  };

  const point = (event) => {
    const element = event.target.closest("[data-step]");
    if (element) select(Number(element.dataset.step), false);
  };
  document.addEventListener("pointerover", point);
  document.addEventListener("click", point);
  document.querySelector(".chart").addEventListener("keydown", (event) => {
    const places = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: rows.length - 1 };
    if (!(event.key in places)) return;
    event.preventDefault();
    select(Math.min(rows.length - 1, Math.max(0, places[event.key])), true);
  });
  for (const choice of all("input[name=scale]")) {
    choice.addEventListener("change", () => {
      for (const chart of all(".chart svg")) chart.toggleAttribute("hidden", chart.dataset.scale !== choice.value);
    });
  }
})();
