// The page: settings live in the part of the address after #, so that a link keeps them. A second explorer compares.
const data = JSON.parse(document.getElementById("data").textContent);
const places = document.getElementById("explorers");
const explorers = [];

const ask = async (kind, settings) => {
  const reply = await fetch(kind, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(settings) });
  if (!reply.ok) throw new Error(`status ${reply.status}`);
  return reply.json();
};
const told = () => history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(explorers.map((one) => one.settings)))}`);

function fromLink() {
  try {
    const all = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    return Array.isArray(all) && all.length ? all.slice(0, 2) : null;
  } catch {
    return null;
  }
}

function add(settings) {
  const explorer = { settings };
  explorers.push(explorer);
  const place = places.appendChild(make("div"));
  mount(place, { ask, controls: data.controls, probes: data.probes, settings, told });
  places.classList.toggle("two", explorers.length > 1);
  return place;
}

const compare = document.getElementById("compare");
compare.addEventListener("click", () => {
  if (explorers.length > 1) {
    explorers.pop();
    places.lastElementChild.remove();
    places.classList.remove("two");
    told();
  } else {
    add({ ...explorers[0].settings });
  }
  compare.textContent = explorers.length > 1 ? "Close the second" : "Compare";
});
for (const settings of fromLink() ?? [data.settings]) add({ ...data.settings, ...settings });
compare.textContent = explorers.length > 1 ? "Close the second" : "Compare";
document.getElementById("link").addEventListener("click", ({ target }) => copy(location.href, target, target));

const root = document.documentElement, theme = document.getElementById("theme");
theme.addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
