// Search, filters and pages of each sample browser, which read without this.
"use strict";
(() => {
  const PAGE = 20;
  let browsers = [];

  function browser(box) {
    const form = box.querySelector(".filters");
    const all = [...box.querySelectorAll(".sample-list > .sample")];
    const said = form.querySelector(".filters-said");
    const pager = box.querySelector(".pager");
    const [previous, next] = pager.querySelectorAll("button");
    const field = (name) => form.elements.namedItem(name);
    const texts = new Map();
    let matching = all;
    let page = 0;

    form.hidden = false;
    box.querySelector(".sample-list").classList.add("paged");

    // A sample's outcomes are words "pair:judge:verdict"; a filter that is not set fits any.
    function pattern() {
      const part = (name) => field(name)?.value || "[^: ]+";
      return new RegExp(`(^| )${part("pair")}:${part("judge")}:${part("verdict")}( |$)`);
    }

    function textOf(sample) {
      if (!texts.has(sample)) texts.set(sample, sample.textContent.toLowerCase());
      return texts.get(sample);
    }

    function filter() {
      const isSet = ["pair", "judge", "verdict"].some((name) => field(name)?.value);
      const fits = pattern();
      const category = field("category")?.value ?? "";
      const words = field("words").value.toLowerCase().trim();
      matching = all.filter(
        (sample) =>
          (!isSet || fits.test(sample.dataset.outcomes)) &&
          (!category || sample.dataset.category === category) &&
          (!field("disagree")?.checked || sample.dataset.disagree === "1") &&
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
      box.scrollIntoView();
      matching[page * PAGE]?.querySelector("summary").focus({ preventScroll: true });
    }

    function clear() {
      form.reset();
      filter();
    }

    let typing = 0;
    form.addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(filter, 120);
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    field("clear").addEventListener("click", clear);
    field("open-all").addEventListener("click", () => {
      const shown = all.filter((sample) => !sample.hidden);
      const open = shown.some((sample) => !sample.open);
      for (const sample of shown) sample.open = open;
    });
    previous.addEventListener("click", () => turn(-1));
    next.addEventListener("click", () => turn(1));
    filter();

    return {
      // Shows a sample whatever the filters say; false if it is another browser's.
      reveal(sample) {
        if (!all.includes(sample)) return false;
        if (!matching.includes(sample)) clear();
        show(Math.floor(matching.indexOf(sample) / PAGE));
        return true;
      },
      choose(values) {
        form.reset();
        for (const name of ["pair", "judge", "verdict"]) if (field(name)) field(name).value = values[name];
        filter();
      },
    };
  }

  // A link to a prompt shows it whatever the filters say.
  function follow() {
    if (!location.hash.startsWith("#prompt-")) return;
    const sample = document.getElementById(location.hash.slice(1))?.closest(".sample");
    if (!sample || !browsers.some((one) => one.reveal(sample))) return;
    for (let box = sample.parentElement; box; box = box.parentElement) if (box.tagName === "DETAILS") box.open = true;
    sample.open = true;
    sample.scrollIntoView();
    sample.querySelector("summary").focus({ preventScroll: true });
  }

  function start() {
    browsers = [...document.querySelectorAll(".samples")].map(browser);
    for (const link of document.querySelectorAll("a[data-verdict]")) {
      link.addEventListener("click", () => browsers[0]?.choose(link.dataset));
    }
  }

  start();
  document.addEventListener("heed:replaced", start); // by a live page
  addEventListener("hashchange", follow);
  follow();
})();
