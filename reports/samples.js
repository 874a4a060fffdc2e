// Filters and pages of the sample browser, which reads without this.
"use strict";
(() => {
  const PAGE = 20;
  const form = document.getElementById("filters");
  if (!form) return;
  const all = [...document.querySelectorAll("#sample-list > .sample")];
  const said = document.getElementById("filters-said");
  const pager = document.getElementById("pager");
  const [previous, next] = pager.querySelectorAll("button");
  const texts = new Map();
  let matching = all;
  let page = 0;

  form.hidden = false;
  document.getElementById("sample-list").classList.add("paged");

  // A sample's outcomes are words "pair:judge:verdict"; a filter that is not set fits any.
  function pattern() {
    const part = (name) => form.elements[name]?.value || "[^: ]+";
    return new RegExp(`(^| )${part("pair")}:${part("judge")}:${part("verdict")}( |$)`);
  }

  function textOf(sample) {
    if (!texts.has(sample)) texts.set(sample, sample.textContent.toLowerCase());
    return texts.get(sample);
  }

  function filter() {
    const isSet = ["pair", "judge", "verdict"].some((name) => form.elements[name]?.value);
    const fits = pattern();
    const category = form.elements.category?.value ?? "";
    const words = form.elements.words.value.toLowerCase().trim();
    matching = all.filter(
      (sample) =>
        (!isSet || fits.test(sample.dataset.outcomes)) &&
        (!category || sample.dataset.category === category) &&
        (!form.elements.disagree.checked || sample.dataset.disagree === "1") &&
        (!words || textOf(sample).includes(words)),
    );
    show(0);
  }

  function show(number) {
    const last = Math.max(0, Math.ceil(matching.length / PAGE) - 1);
    page = Math.min(Math.max(0, number), last);
    const shown = new Set(matching.slice(page * PAGE, (page + 1) * PAGE));
    for (const sample of all) sample.hidden = !shown.has(sample);
    const range = matching.length ? `${page * PAGE + 1} to ${page * PAGE + shown.size} of ` : "";
    const them = matching.length === 1 ? "prompt" : "prompts";
    said.textContent = `${range}${matching.length.toLocaleString("en")} ${them} that fit${form.dataset.held}`;
    pager.hidden = last === 0;
    previous.disabled = page === 0;
    next.disabled = page === last;
  }

  function turn(step) {
    show(page + step);
    document.getElementById("samples").scrollIntoView();
    matching[page * PAGE]?.querySelector("summary").focus({ preventScroll: true });
  }

  // A link to a prompt shows it whatever the filters say.
  function follow() {
    if (!location.hash.startsWith("#prompt-")) return;
    const target = document.getElementById(location.hash.slice(1));
    const sample = target?.closest(".sample");
    if (!sample) return;
    if (!matching.includes(sample)) {
      form.reset();
      filter();
    }
    show(Math.floor(matching.indexOf(sample) / PAGE));
    sample.open = true;
    sample.scrollIntoView();
    sample.querySelector("summary").focus({ preventScroll: true });
  }

  let typing = 0;
  form.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(filter, 120);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("clear").addEventListener("click", () => {
    form.reset();
    filter();
  });
  document.getElementById("open-all").addEventListener("click", () => {
    const shown = all.filter((sample) => !sample.hidden);
    const open = shown.some((sample) => !sample.open);
    for (const sample of shown) sample.open = open;
  });
  previous.addEventListener("click", () => turn(-1));
  next.addEventListener("click", () => turn(1));
  for (const link of document.querySelectorAll("a[data-verdict]")) {
    link.addEventListener("click", () => {
      form.reset();
      for (const name of ["pair", "judge", "verdict"]) {
        if (form.elements[name]) form.elements[name].value = link.dataset[name];
      }
      filter();
    });
  }
  addEventListener("hashchange", follow);
  filter();
  follow();
})();
