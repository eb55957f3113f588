"use strict";

// Theme: the system's, until the button chooses the other one.
const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const button = document.getElementById("theme");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
const showTheme = () => button.setAttribute("aria-pressed", String(isDark()));
button.addEventListener("click", () => {
  const dark = !isDark();
  if (dark === prefersDark.matches) delete root.dataset.theme; // follow the system again
  else root.dataset.theme = dark ? "dark" : "light";
  showTheme();
});
prefersDark.addEventListener("change", showTheme);
showTheme();

// Menus: show the words and the picture of the choice, hide the others.
for (const figure of document.querySelectorAll(".curve")) {
  figure.querySelector("select")?.addEventListener("change", ({ target }) => {
    for (const part of figure.querySelectorAll("[data-choice]")) {
      part.hidden = part.dataset.choice !== String(target.selectedIndex);
    }
  });
}

// Copy: the command beside the button.
for (const copier of document.querySelectorAll("[data-copy]")) {
  copier.addEventListener("click", async () => {
    const command = copier.previousElementSibling;
    try {
      await navigator.clipboard.writeText(command.textContent);
    } catch { // an old browser, or a page from a file: the text is selected, so that it can be copied by hand
      getSelection().selectAllChildren(command);
      document.execCommand("copy");
    }
    copier.textContent = "Copied";
    setTimeout(() => (copier.textContent = "Copy"), 2000);
  });
}

// Save: the picture that is seen, with the colours that it has now, as a file.
function standalone(svg) {
  const probe = document.body.appendChild(document.createElement("i"));
  const color = (_, name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const [, , width, height] = svg.getAttribute("viewBox").split(" ");
  const copy = svg.cloneNode(true);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  copy.setAttribute("style", "background: var(--paper); font-family: sans-serif");
  const text = new XMLSerializer().serializeToString(copy).replace(/var\((--\w+)\)/g, color);
  probe.remove();
  return { text, width: Number(width), height: Number(height) };
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function savePng({ text, width, height }, name) {
  const image = new Image();
  image.setAttribute("src", `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`);
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * width, 2 * height];
  const context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => save(blob, name));
}

for (const saver of document.querySelectorAll("[data-save]")) {
  saver.addEventListener("click", () => {
    const figure = saver.closest("figure");
    const svg = [...figure.querySelectorAll(".plot svg")].find((one) => one.getClientRects().length);
    const picture = standalone(svg);
    const name = `${figure.dataset.curve}.${saver.dataset.save}`;
    if (saver.dataset.save === "png") savePng(picture, name);
    else save(new Blob([picture.text], { type: "image/svg+xml" }), name);
  });
}

// Tips: the text of the point nearest to the pointer, or of the point that the arrow keys have reached.
const NEAR = 40; // pixels
const tip = document.getElementById("tip");

// All points of a plot in pixels from its top left corner, from left to right.
function pointsOf(plot) {
  const edge = plot.getBoundingClientRect();
  const picture = [...plot.children].find((one) => one.dataset.panels && one.getClientRects().length);
  const box = picture.getBoundingClientRect();
  const panels = JSON.parse(picture.dataset.panels);
  return JSON.parse(plot.dataset.points)
    .map(([panel, x, y, text]) => {
      const [left, top, width, height] = panels[panel];
      return { x: box.left - edge.left + (left + x * width) * box.width, y: box.top - edge.top + (top + y * height) * box.height, text };
    })
    .sort((one, other) => one.x - other.x || one.y - other.y);
}

function showTip(plot, point) {
  plot.append(tip);
  tip.hidden = false;
  tip.firstElementChild.textContent = point.text;
  tip.style.setProperty("--x", `${point.x}px`);
  tip.style.setProperty("--y", `${point.y}px`);
  tip.classList.toggle("left", point.x > plot.clientWidth / 2);
  tip.classList.toggle("below", point.y < plot.clientHeight / 4);
}

function hideTip() {
  tip.hidden = true;
}

for (const plot of document.querySelectorAll(".plot")) {
  let reached = -1;
  const point = (event) => {
    const edge = plot.getBoundingClientRect();
    const far = (one) => Math.hypot(one.x - (event.clientX - edge.left), one.y - (event.clientY - edge.top));
    const points = pointsOf(plot);
    const nearest = points.reduce((best, one) => (far(one) < far(best) ? one : best), points[0]);
    if (nearest && far(nearest) < NEAR) showTip(plot, nearest);
    else hideTip();
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hideTip);
  plot.addEventListener("blur", hideTip);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hideTip();
    if (!step) return;
    event.preventDefault();
    const points = pointsOf(plot);
    reached = Math.min(Math.max(reached + step, 0), points.length - 1);
    if (points.length) showTip(plot, points[reached]);
  });
}
