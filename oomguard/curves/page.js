"use strict";
const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const printing = matchMedia("print");
const toggle = document.getElementById("theme");
const { template, curves } = JSON.parse(document.getElementById("drawings").textContent);
const ON_PAPER = { width: 660, height: 350 };
const TALL_ON_PAPER = { width: 660, height: 480 };
const narrow = matchMedia("(max-width: 37rem)");
const SETTINGS = {
  responsive: true,
  displaylogo: false,
  showSendToCloud: false,
  plotlyServerURL: "", // nothing leaves the page
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
};
let onPaper = false;

// The theme that is seen: paper is light, then what was chosen here, then what the system prefers.
function isDark() {
  if (onPaper || printing.matches) return false;
  return root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
}

function put(figure, path, value) {
  const last = path[path.length - 1];
  path.slice(0, -1).reduce((at, name) => at[name], figure)[last] = value;
}

// Words along an axis have no room side by side on a phone; numbers do.
function tilt(axis) {
  const words = axis.ticktext?.map((word) => word.replace("<br>", " "));
  if (!words?.some((word) => Number.isNaN(parseFloat(word)))) return;
  Object.assign(axis, { ticktext: words, tickangle: -45, automargin: true });
}

// Draws one curve anew: the same figure in either theme, a zoom stays until another one is chosen.
function draw(place, number) {
  const menu = place.querySelector("select");
  const chosen = menu ? menu.selectedIndex : 0;
  const { words, light, dark } = curves[number][chosen];
  const figure = structuredClone(light);
  if (isDark()) for (const [path, value] of dark) put(figure, path, value);
  figure.layout.template = template;
  figure.layout.uirevision = `${chosen}`;
  const soft = getComputedStyle(place.querySelector(".question")).color;
  figure.layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: soft };
  figure.layout.margin.t = 40; // its buttons
  if (narrow.matches) {
    Object.assign(figure.layout.margin, { l: 54, r: 8 });
    figure.layout.font.size = 12;
    tilt(figure.layout.xaxis);
  }
  if (onPaper) Object.assign(figure.layout, place.classList.contains("tall") ? TALL_ON_PAPER : ON_PAPER);
  if (matchMedia("(pointer: coarse)").matches) figure.layout.dragmode = false; // a finger scrolls the page
  for (const [part, text] of Object.entries(words)) place.querySelector(part).textContent = text;
  Plotly.react(place.querySelector(".plot"), figure.data, figure.layout, SETTINGS);
}

function show() {
  toggle.setAttribute("aria-pressed", String(isDark()));
  document.querySelectorAll(".curve").forEach(draw);
}

document.querySelectorAll(".curve").forEach((place, number) => {
  place.querySelector("select")?.addEventListener("change", () => draw(place, number));
});
toggle.addEventListener("click", () => {
  const dark = !isDark();
  if (dark === prefersDark.matches) delete root.dataset.theme; // as the system has it: follow the system again
  else root.dataset.theme = dark ? "dark" : "light";
  show();
});
for (const query of [prefersDark, printing, narrow]) query.addEventListener("change", show);
addEventListener("beforeprint", () => {
  onPaper = true;
  show();
});
addEventListener("afterprint", () => {
  onPaper = false;
  show();
  document.querySelectorAll(".plot").forEach((plot) => Plotly.Plots.resize(plot)); // as wide as the screen again
});
show();
