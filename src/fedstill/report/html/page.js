"use strict";
(() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");

  // ---- theme: as the system has it, until the button is pressed
  const theme = document.getElementById("theme");
  const systemDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemDark());
  const label = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  const asked = new URLSearchParams(location.hash.slice(1)).get("theme");
  if (asked === "dark" || asked === "light") root.dataset.theme = asked;
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  theme.hidden = false;
  label();

  // ---- panes of a figure; clicks are heard by the document, since a live page is replaced
  const clicked = (selector, act) => document.addEventListener("click", (event) => {
    const found = event.target.closest && event.target.closest(selector);
    if (found) act(found, event);
  });
  clicked("button[data-pane]", (button) => {
    for (const other of button.parentElement.children) {
      const shown = other === button;
      other.setAttribute("aria-pressed", String(shown));
      document.getElementById(other.dataset.pane).hidden = !shown;
    }
  });

  // ---- numbers under the pointer
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 4))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18}px`;
  };
  const points = new WeakMap(); // of a line's path, in the figure's units
  const pointsOf = (path) => {
    if (!points.has(path)) {
      const numbers = path.getAttribute("d").match(/-?\d*\.?\d+/g).map(Number);
      const at = [[numbers[0], numbers[1]]];
      for (let i = 2; i + 1 < numbers.length; i += 2) {
        const [x, y] = at[at.length - 1];
        at.push([x + numbers[i], y + numbers[i + 1]]);
      }
      points.set(path, at);
    }
    return points.get(path);
  };
  let near = null;
  const leave = () => {
    tip.hidden = true;
    if (near) near.classList.remove("near");
    near = null;
  };
  const nearest = (figure, event) => {
    const matrix = figure.getScreenCTM();
    if (!matrix) return null;
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
    let best = null;
    for (const path of figure.querySelectorAll("path[data-series]")) {
      for (const [x, y] of pointsOf(path)) {
        const distance = (x - at.x) ** 2 + (y - at.y) ** 2 + (path.classList.contains("sx") ? 60 : 0);
        if (!best || distance < best.distance) best = { distance, path, x, y };
      }
    }
    return best && best.distance < 1600 ? best : null;
  };
  const written = (value) => Number(value.toPrecision(4)).toLocaleString("en");
  document.addEventListener("pointermove", (event) => {
    const marked = event.target.closest && event.target.closest("[data-tip]");
    const figure = event.target.closest && event.target.closest("svg[data-curves]");
    if (near) near.classList.remove("near");
    near = null;
    if (marked) return show(marked.dataset.tip, event.clientX, event.clientY);
    const found = figure && nearest(figure, event);
    if (!found) return leave();
    const [x0, x1, px0, px1, y0, y1, py0, py1] = figure.dataset.curves.split(" ").map(Number);
    const x = x0 + ((found.x - px0) / (px1 - px0)) * (x1 - x0);
    const y = y0 + ((found.y - py0) / (py1 - py0)) * (y1 - y0);
    near = found.path;
    near.classList.add("near");
    const unit = figure.dataset.x;
    const where = unit === "round" ? `round ${Math.round(x)}` : unit === "%" ? `up to ${written(x)} %` : `${written(x)} ${unit}`;
    const what = figure.dataset.y ? `${y.toFixed(0)} % ${figure.dataset.y}` : `${y.toFixed(2)} %`;
    show(`${near.dataset.series}: ${what}, ${where}`, event.clientX, event.clientY);
  });
  document.addEventListener("pointerleave", leave);
  addEventListener("scroll", leave, { passive: true });

  // ---- a figure as a file, in the light theme's colours
  const save = (href, name) => {
    const link = document.createElement("a");
    link.href = href;
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
  };
  const standalone = (figure) => {
    const sample = document.createElement("div");
    sample.dataset.theme = "light";
    document.body.append(sample);
    const light = getComputedStyle(sample);
    const copy = figure.cloneNode(true);
    const rules = document.getElementById("figure-css").textContent;
    const style = document.createElementNS("http://www.w3.org/2000/svg", "style");
    style.textContent = rules.replace(/var\((--[a-z0-9-]+)\)/g, (whole, name) => light.getPropertyValue(name).trim() || whole);
    copy.prepend(style);
    const [, , width, height] = figure.getAttribute("viewBox").split(" ");
    copy.setAttribute("width", width);
    copy.setAttribute("height", height);
    sample.remove();
    return new XMLSerializer().serializeToString(copy);
  };
  clicked("button[data-svg]", (button) => {
    const pane = document.getElementById(button.dataset.svg).querySelector(".pane:not([hidden]) .wide svg");
    save(`data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(pane))}`, `${button.dataset.svg}.svg`);
  });

  // ---- tables to the clipboard; where that cannot be, the link saves a file
  clicked("a[data-copy]", (link, event) => {
    if (!navigator.clipboard || !isSecureContext) return;
    event.preventDefault();
    const words = link.textContent;
    const say = (text) => { link.textContent = text; setTimeout(() => { link.textContent = words; }, 1500); };
    const text = decodeURIComponent(link.href.slice(link.href.indexOf(",") + 1));
    navigator.clipboard.writeText(text).then(() => say("copied"), () => save(link.href, link.download));
  });
})();
