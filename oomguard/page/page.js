"use strict";
const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const printing = matchMedia("print");
const toggle = document.getElementById("theme");

// The theme that is seen: paper is light, then what was chosen here, then what the system prefers.
function isDark() {
  if (printing.matches) return false;
  return root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
}

function showTheme() {
  toggle.setAttribute("aria-pressed", String(isDark()));
}

toggle.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  showTheme();
});
for (const query of [prefersDark, printing]) query.addEventListener("change", showTheme);
showTheme();
