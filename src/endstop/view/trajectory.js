"use strict";
(() => {
  const steps = [...document.querySelectorAll("article")];
  const folds = [...document.querySelectorAll("details")];
  const go = (by) => {
    const shown = steps.filter((step) => !step.hidden);
    const place = shown.indexOf(document.activeElement.closest("article")) + by;
    const step = shown[Math.max(0, Math.min(shown.length - 1, place))];
    if (!step) return;
    step.scrollIntoView({ block: "start" });
    step.focus({ preventScroll: true });
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|TEXTAREA/.test(event.target.tagName ?? "")) return;
    if (event.key === "j") go(1);
    else if (event.key === "k") go(-1);
  });
  document.querySelector("[data-do=unfold]").addEventListener("click", (event) => {
    const open = folds.some((fold) => !fold.open);
    for (const fold of folds) fold.open = open;
    event.target.textContent = open ? "fold all" : "unfold all";
  });
  document.querySelector("[data-do=decisions]").addEventListener("click", (event) => {
    const only = event.target.getAttribute("aria-pressed") !== "true";
    event.target.setAttribute("aria-pressed", String(only));
    for (const step of steps) step.hidden = only && step.dataset.decided === "no";
  });
})();
