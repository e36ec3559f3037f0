"use strict";
// Replaces what changes, every two seconds while the page is seen; which figure's pane is shown and what is unfolded stays.
(() => {
  const main = document.querySelector("main");
  const lost = document.getElementById("lost");
  let last = "";
  const renew = async () => {
    if (document.hidden || main.querySelector("[data-over]")) return;
    try {
      const answer = await fetch("/part", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const text = await answer.text();
      lost.hidden = true;
      if (text === last) return;
      last = text;
      const panes = [...main.querySelectorAll('button[data-pane][aria-pressed="true"]')].map((b) => b.dataset.pane);
      const open = [...main.querySelectorAll("details")].map((d) => d.open);
      main.innerHTML = text;
      for (const pane of panes) main.querySelector(`button[data-pane="${pane}"]`)?.click();
      main.querySelectorAll("details").forEach((d, i) => { if (i in open) d.open = open[i]; });
    } catch {
      lost.hidden = false;
    }
  };
  setInterval(renew, 2000);
  document.addEventListener("visibilitychange", renew);
})();
