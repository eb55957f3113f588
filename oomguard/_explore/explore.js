"use strict";

// One explorer: controls on one side, answers on the other. `ask(kind, settings)` gives a promise of the answer.
const NS = "http://www.w3.org/2000/svg";
const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const draw = (tag, attributes, text = "") => {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.append(text);
  return element;
};
const label = (name) => name.replaceAll("_", " ");
const whole = (number) => Number(number).toLocaleString("en-US");
const size = (bytes) => (bytes < 2 ** 30 ? `${(bytes / 2 ** 20).toFixed(0)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`);

// A slider moves on a logarithmic scale where its range is wide.
const NOTCHES = 400;
const isWide = ({ low, high }) => high / low > 64;
const toValue = (control, place) => {
  const share = place / NOTCHES, { low, high } = control;
  return Math.round(isWide(control) ? low * (high / low) ** share : low + (high - low) * share);
};
const toPlace = (control, value) => {
  const { low, high } = control, here = Math.min(Math.max(value, low), high);
  return Math.round(NOTCHES * (isWide(control) ? Math.log(here / low) / Math.log(high / low) : (here - low) / (high - low)));
};

function addControl(form, control, settings, changed) {
  const id = `c${Math.random().toString(36).slice(2)}`, value = settings[control.name];
  const row = make("div", { class: "control" }, make("label", { for: id }, label(control.name)));
  const set = (text) => {
    if (text === "" || text === null) delete settings[control.name];
    else settings[control.name] = text;
    changed();
  };
  if (control.kind === "choice") {
    const select = make("select", { id, name: control.name });
    if (control.optional) select.append(make("option", { value: "" }, "default"));
    select.append(...control.choices.map((choice) => make("option", { value: choice }, choice)));
    select.value = value ?? (control.optional ? "" : control.choices[0]);
    select.addEventListener("change", () => set(control.choices.find((choice) => String(choice) === select.value) ?? ""));
    row.append(select);
  } else if (control.kind === "switch") {
    const box = make("input", { id, name: control.name, type: "checkbox" });
    box.checked = Boolean(value);
    box.addEventListener("change", () => set(box.checked));
    row.append(box);
  } else if (control.kind === "number") {
    const box = make("input", { id, name: control.name, type: "number", min: control.low, max: control.most, step: 1 });
    const slider = make("input", { type: "range", min: 0, max: NOTCHES, "aria-label": `${label(control.name)}, slider` });
    const own = { ...control };
    const reach = () => { // microbatch and segments end where batch and seq do
      own.high = control.high ?? ({ microbatch: settings.batch, segments: settings.seq, window: settings.seq }[control.name] ?? 1e6);
      own.high = Math.max(own.high, own.low + 1);
      slider.value = toPlace(own, Number(settings[control.name] ?? (control.name === "microbatch" ? settings.batch : own.low)));
      box.placeholder = { microbatch: "the batch", segments: "1" }[control.name] ?? (control.optional ? "none" : "");
    };
    box.value = value ?? "";
    reach();
    row.refresh = reach;
    slider.addEventListener("input", () => { box.value = toValue(own, Number(slider.value)); set(Number(box.value)); });
    box.addEventListener("input", () => { set(box.value === "" ? null : Number(box.value)); reach(); });
    row.append(box, slider);
  } else {
    const box = make("input", { id, name: control.name, type: "text", placeholder: control.name === "budget" ? "what is free" : "" });
    box.value = value ?? "";
    box.addEventListener("input", () => set(box.value.trim()));
    row.append(box);
  }
  form.append(row);
  return row;
}

// The terms as bars beside the budget. The longest bar is the larger of need and budget.
function showBars(place, { bars, fits }) {
  const sizes = Object.fromEntries(bars.map((bar) => [bar.name, bar.bytes]));
  const longest = Math.max(sizes.total + sizes.margin, sizes.budget, 1);
  place.replaceChildren(...bars.map((bar) => {
    const fill = make("i"), over = bar.name === "total" && !fits;
    fill.style.width = `${(100 * bar.bytes) / longest}%`;
    const row = make("tr", { "data-term": bar.name, class: over ? "over" : "" });
    row.append(make("th", { scope: "row" }, bar.name), make("td", { class: "r" }, bar.text), make("td", { class: "fill", "aria-hidden": "true" }, fill));
    return row;
  }));
}

const WORDS = { "-1": "is not traced in segments", 0: "does not fit", 1: "fits in segments", 2: "fits as it is" };
const SIGNS = { "-1": "?", 0: "–", 1: "◐", 2: "●" };

// Which microbatches and lengths fit: a table of cells, which keyboards and screen readers can walk through.
function showRegion(place, region, settings, choose) {
  const head = make("tr", {}, make("th", { scope: "col" }, "steps \\ rows"), ...region.microbatches.map((rows) => make("th", { scope: "col" }, whole(rows))));
  const body = region.lengths.map((steps, line) => {
    const cells = region.cells[line].map((fits, column) => {
      const rows = region.microbatches[column];
      const here = (region.fixed || steps === settings.seq) && rows === (settings.microbatch ?? settings.batch);
      const words = `${whole(rows)} × ${whole(steps)} ${WORDS[fits]}`;
      const button = make("button", { type: "button", class: `fit${fits}${here ? " here" : ""}`, title: words, "aria-label": words }, SIGNS[fits]);
      button.addEventListener("click", () => choose({ microbatch: rows, ...(region.fixed ? {} : { seq: steps }) }));
      return make("td", {}, button);
    });
    return make("tr", {}, make("th", { scope: "row" }, whole(steps)), ...cells);
  });
  place.replaceChildren(make("thead", {}, head), make("tbody", {}, ...body.reverse()));
}

// Speed against memory: the front, and where the present settings are.
function showFront(place, { points, now, ran, probes }, choose) {
  const width = 480, height = 240, left = 46, bottom = 34, right = 12, top = 10;
  const peaks = [...points, ...ran, now].map((point) => point.peak_bytes);
  const [low, high] = [Math.min(...peaks) / 1.1, Math.max(...peaks) * 1.1];
  const x = (bytes) => left + ((width - left - right) * Math.log(bytes / low)) / Math.log(high / low);
  const y = (speed) => height - bottom - (height - bottom - top) * Math.min(speed, 1);
  const answer = points.length ? `${points.length} candidates fit and are beaten by none, from ${points[0].text} at ${Math.round(100 * points[0].speed)} % of the speed to ${points.at(-1).text} at ${Math.round(100 * points.at(-1).speed)} %.` : "No candidate fits.";
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": answer });
  for (const share of [0, 0.5, 1]) {
    svg.append(draw("line", { x1: left, x2: width - right, y1: y(share), y2: y(share), class: "grid" }));
    svg.append(draw("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`));
  }
  svg.append(draw("text", { x: width - right, y: height - 4, "text-anchor": "end" }, "peak memory →"));
  for (const share of [0, 1 / 3, 2 / 3, 1]) {
    const bytes = low * (high / low) ** share, anchor = { 0: "start", 1: "end" }[share] ?? "middle";
    svg.append(draw("text", { x: x(bytes), y: height - bottom + 15, "text-anchor": anchor }, size(bytes)));
  }
  if (points.length > 1) svg.append(draw("polyline", { class: "front", points: points.map((point) => `${x(point.peak_bytes)},${y(point.speed)}`).join(" ") }));
  const dot = (point, name, text) => {
    const circle = draw("circle", { cx: x(point.peak_bytes), cy: y(point.speed), r: name === "now" ? 7 : 5, class: name });
    circle.append(draw("title", {}, text));
    svg.append(circle);
    return circle;
  };
  for (const point of points) {
    const { microbatch, segments } = point.knobs;
    const words = `microbatch ${whole(microbatch)}, ${segments > 1 ? `${whole(segments)} segments` : "no segments"}: ${point.text}`;
    const circle = dot(point, "point", words);
    for (const [name, value] of Object.entries({ role: "button", tabindex: 0, "aria-label": words })) circle.setAttribute(name, value);
    circle.addEventListener("click", () => choose(point.knobs));
    circle.addEventListener("keydown", ({ key }) => (key === "Enter" || key === " ") && choose(point.knobs));
  }
  for (const record of ran) dot(record, "ran", `measured, ${record.words}: ${record.text}`);
  dot(now, "now", `now: ${now.text}`);
  place.replaceChildren(svg, make("p", { class: "soft" }, `${answer} ${probes ? `Speeds are shares of the fastest, learned from ${probes} probe${probes > 1 ? "s" : ""}. ${ran.length ? "A ring is what was measured of this model, length and batch." : ""}` : "Speeds are guesses, as shares of the fastest: nothing was run."}`));
}

function showMeasured(place, measured) {
  place.replaceChildren();
  if (!measured.length) return;
  const head = make("tr", {}, ...["rows × steps", "settings", "verdict", "measured", "estimated"].map((text) => make("th", { scope: "col" }, text)));
  const rows = measured.map((record) => make("tr", {}, ...[`${whole(record.microbatch)} × ${whole(record.seq)}`, record.words, record.verdict, record.measured, record.estimated].map((text) => make("td", {}, text))));
  place.append(make("h3", {}, "Measured"), make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

function showCopies(place, copies) {
  const kinds = { command: "Command line", python: "Python", toml: "spec.toml", jobs: "jobs.toml, for oomguard fleet" };
  place.replaceChildren(...Object.entries(copies).flatMap(([kind, text]) => {
    const name = kinds[kind];
    const button = make("button", { type: "button" }, "Copy"), content = make("pre", {}, text);
    button.addEventListener("click", () => copy(text, content, button));
    return [make("div", { class: "copied" }, make("span", {}, name), button), content];
  }));
}

async function copy(text, element, button) {
  const words = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch { // the text is selected, so that it can be copied by hand
    getSelection().selectAllChildren(element);
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = words), 2000);
}

// Puts one explorer into a place. `settings` is changed as controls move; `told` hears of every change.
function mount(place, { ask, controls, settings, probes, told = () => {} }) {
  const form = make("form", { class: "controls", "aria-label": "Settings" });
  const title = make("h2"), verdict = make("p", { class: "verdict", role: "status" }), moment = make("p", { class: "soft" });
  const bars = make("tbody"), region = make("table", { class: "region" }), front = make("div"), advice = make("ul");
  const copies = make("div"), measured = make("div", { class: "measured" }), probed = make("p", { class: "soft", role: "status" });
  const section = (name, ...parts) => make("section", {}, make("h3", {}, name), ...parts);
  const speed = section("How much memory does speed need?", front), tracing = make("p", { class: "soft tracing" });
  const answers = make("div", { class: "answers" }, moment, tracing, make("table", { class: "bars" }, bars),
    section("Advice", advice), section("Which microbatches and lengths fit?", make("div", { class: "scroll" }, region), make("p", { class: "soft" }, "● fits as it is, ◐ fits in segments, – does not fit. Choose a cell to go there.")),
    speed, measured, section("Take it with you", copies));
  if (probes) {
    const button = make("button", { type: "button" }, "Measure this");
    button.addEventListener("click", () => measure(button));
    answers.prepend(make("p", {}, button), probed);
  }
  place.classList.add("explorer");
  place.replaceChildren(make("div", { class: "head" }, title, verdict), form, answers);

  let waiting = false, again = false, timer;
  function refresh() {
    for (const row of rows) row.refresh?.();
    told(settings);
    update();
  }

  async function update() {
    clearTimeout(timer);
    if (waiting) { again = true; return; } // only the newest settings are asked about
    waiting = true;
    try {
      do {
        again = false;
        const reply = await ask("answer", { ...settings });
        show(reply);
        if (reply.tracing && place.isConnected) timer = setTimeout(update, 500); // there will be more to show
      } while (again);
    } catch (error) {
      show({ error: `The explorer does not answer any more (${error.message}). Start it again.` });
    } finally {
      waiting = false;
    }
  }

  function show(answer) {
    answers.classList.toggle("stale", Boolean(answer.error));
    verdict.classList.toggle("over", Boolean(answer.error) || !answer.fits);
    tracing.textContent = answer.tracing ?? "";
    if (answer.error) { verdict.textContent = answer.error; return; }
    [title.textContent, verdict.textContent, moment.textContent] = [answer.title, answer.verdict, answer.moment];
    showBars(bars, answer);
    advice.replaceChildren(...(answer.advice.length ? answer.advice : [answer.fits ? "There is nothing to improve." : "No single change that is known makes it fit."]).map((line) => make("li", {}, line)));
    showRegion(region, answer.region, settings, choose);
    speed.hidden = !answer.front; // nothing is known of the speed of a task
    if (answer.front) showFront(front, answer.front, choose);
    showMeasured(measured, answer.measured);
    showCopies(copies, answer.copies);
  }

  async function measure(button) {
    button.disabled = true;
    const began = Date.now();
    const clock = setInterval(() => (probed.textContent = `Running a few steps, for ${Math.round((Date.now() - began) / 1000)} s`), 500);
    const reply = await ask("measure", { ...settings }).catch((error) => ({ error: error.message }));
    clearInterval(clock);
    probed.textContent = reply.error ?? reply.words;
    button.disabled = false;
    refresh();
  }

  let rows = [];
  function build() {
    form.replaceChildren();
    rows = controls.map((control) => addControl(form, control, settings, refresh));
  }
  function choose(changes) {
    Object.assign(settings, changes);
    build();
    refresh();
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  build();
  refresh();
  return { settings, choose };
}
