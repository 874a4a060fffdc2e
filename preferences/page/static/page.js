// Keyboard shortcuts, drafts, and a button that copies the key. Every page works without this file.
"use strict";

// What was typed into a task's form survives a reload, the Back button and an unreachable server: only in this tab, and
// until another task is shown. A form that the server has filled in is left as it is.
function keepDraft() {
  const form = document.getElementById("answer");
  if (location.pathname === "/sign-in") sessionStorage.clear();
  if (!form) return;
  const key = `draft ${form.elements.task.value} ${form.elements.revision.value}`;
  const isTicked = (one) => one.type === "radio" || one.type === "checkbox";
  const said = () => [...form.elements].filter((one) => one.name && one.type !== "hidden" && one.type !== "submit");
  const isEmpty = said().every((one) => isTicked(one) ? !one.checked : one.value === "" || one.name.startsWith("edit_"));
  const draft = sessionStorage.getItem(key);
  Object.keys(sessionStorage).filter((one) => one.startsWith("draft ") && one !== key).forEach((one) => sessionStorage.removeItem(one));
  if (draft && isEmpty) {
    const { ticked, texts } = JSON.parse(draft);
    said().forEach((one) => {
      if (isTicked(one)) one.checked = ticked.includes(`${one.name}=${one.value}`);
      else if (one.name in texts) one.value = texts[one.name];
    });
    form.querySelectorAll("details.marks").forEach((box) => { box.open = box.querySelector("input:checked") !== null; });
    form.querySelectorAll("details.edit").forEach((box) => {
      box.open = [...box.querySelectorAll("textarea")].some((one) => one.value !== one.defaultValue);
    });
  }
  const keep = (but) => {
    const ticked = said().filter((one) => isTicked(one) && one.checked).map((one) => `${one.name}=${one.value}`);
    const texts = Object.fromEntries(said().filter((one) => !isTicked(one)).map((one) => [one.name, one.value]));
    sessionStorage.setItem(key, JSON.stringify({ ticked, texts: { ...texts, ...but } }));
  };
  document.addEventListener("input", (event) => { // ratings of turns belong to the form, but are not inside it
    if (event.target.form === form) keep({});
  });
  form.addEventListener("submit", (event) => { // a question is sent alone, and the same task comes again
    if (event.submitter?.hasAttribute("formaction")) keep({ question: "" });
  });
}

// The clipboard is there on localhost and over HTTPS only; elsewhere the key is copied by hand.
function offerCopy() {
  const box = document.getElementById("copy-box");
  if (!box || !navigator.clipboard) return;
  box.hidden = false;
  document.getElementById("copy").addEventListener("click", async () => {
    const said = document.getElementById("copied");
    try {
      await navigator.clipboard.writeText(document.getElementById("key").textContent);
      said.textContent = "Copied.";
    } catch {
      said.textContent = "The browser did not allow it: select the key and copy it.";
    }
  });
}

(() => {
  const form = document.getElementById("answer");
  document.getElementById("wrong")?.focus();
  keepDraft();
  offerCopy();
  const keys = document.getElementById("keys");
  if (!form || !keys) return;
  const numResponses = Number(form.dataset.responses);
  const responses = [...form.querySelectorAll(".response")];
  const switched = document.getElementById("keys-on");
  const said = document.getElementById("said");
  const turns = [...document.querySelectorAll(".message.rated")];
  const places = [...responses, ...turns]; // what can be chosen and rated
  const lines = places.map((place) => [...place.querySelectorAll("[data-rating]")]);
  const current = places.map(() => 0); // each place's line of ratings that Shift and a digit fill in
  let chosen = 0;

  keys.hidden = false;
  document.getElementById("keys-box").open = matchMedia("(min-width: 48rem)").matches; // a phone shows responses first
  switched.checked = localStorage.getItem("keys") !== "off";
  switched.addEventListener("change", () => localStorage.setItem("keys", switched.checked ? "on" : "off"));

  function choose(place) {
    chosen = place;
    places.forEach((one, index) => one.classList.toggle("chosen", index === place));
    places[place].scrollIntoView({ block: "nearest" });
    places[place].focus({ preventScroll: true });
    showLine();
  }

  function chooseTurn(step) {
    if (!turns.length) return;
    const from = chosen < numResponses ? (step > 0 ? -1 : turns.length) : chosen - numResponses;
    choose(numResponses + Math.min(Math.max(from + step, 0), turns.length - 1));
    said.textContent = places[chosen].querySelector("h3").textContent;
  }

  function showLine() {
    lines.flat().forEach((line) => line.classList.remove("current"));
    if (lines[chosen].length > 1) lines[chosen][current[chosen]].classList.add("current");
  }

  function rate(digit) {
    const line = lines[chosen][current[chosen]];
    const box = line?.querySelectorAll("input")[digit - 1];
    if (!box) return;
    check(box);
    current[chosen] = (current[chosen] + 1) % lines[chosen].length;
    if (chosen >= numResponses && current[chosen] === 0 && chosen + 1 < places.length) choose(chosen + 1); // the next turn
    else showLine();
  }

  function give(name, value) {
    const box = form.querySelector(`input[name="${name}_${chosen}"][value="${value}"]`);
    if (box) check(box);
  }

  function check(box) {
    box.checked = true;
    box.dispatchEvent(new Event("input", { bubbles: true }));
    said.textContent = box.getAttribute("aria-label");
  }

  function isWriting(target) {
    return target.matches("textarea, select, input:not([type=radio]):not([type=checkbox])");
  }

  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      form.requestSubmit();
      return;
    }
    if (!switched.checked || event.ctrlKey || event.metaKey || event.altKey || isWriting(event.target)) return;
    const digit = /^Digit([1-9])$/.exec(event.code)?.[1] ?? /^Numpad([1-9])$/.exec(event.code)?.[1];
    const letter = event.key.length === 1 ? event.key.toUpperCase().charCodeAt(0) - 65 : -1;
    if (digit) {
      if (event.shiftKey || numResponses === 1) rate(Number(digit)); // a single response has no rank
      else give("rank", digit);
    } else if (letter >= 0 && letter < numResponses) {
      choose(letter);
    } else if (event.key.toUpperCase() === "M") {
      const box = responses[chosen]?.querySelector("details.marks");
      if (box) { box.open = true; box.querySelector("input")?.focus(); }
    } else if (event.key.toUpperCase() === "K" && lines[chosen].length > 1) {
      current[chosen] = (current[chosen] + 1) % lines[chosen].length;
      showLine();
      said.textContent = lines[chosen][current[chosen]].dataset.rating;
    } else if (event.key.toUpperCase() === "J" || event.key.toUpperCase() === "U") {
      chooseTurn(event.key.toUpperCase() === "J" ? 1 : -1);
    } else if (event.key.toUpperCase() === "W") {
      const box = responses[chosen]?.querySelector("details.edit");
      if (box) { box.open = true; box.querySelector("textarea").focus(); }
    } else if (event.key.toUpperCase() === "X") {
      const texts = [...document.querySelectorAll("details.exact")];
      const opens = texts.some((one) => !one.open);
      texts.forEach((one) => { one.open = opens; });
      said.textContent = opens ? "Exact texts" : "Formatted texts";
    } else if (event.key.toUpperCase() === "T" && document.getElementById("earlier")) {
      const earlier = document.getElementById("earlier");
      earlier.open = !earlier.open;
      earlier.querySelector("summary").focus();
      said.textContent = earlier.open ? "Earlier turns are shown" : "Earlier turns are folded";
    } else if (event.key.toUpperCase() === "S") {
      const box = document.getElementById("skip-box");
      if (box) { box.open = true; document.getElementById("reason").focus(); }
    } else if (event.key.toUpperCase() === "N" || event.key.toUpperCase() === "R") {
      const link = document.querySelector(event.key.toUpperCase() === "N" ? "nav a[rel=next]" : "nav a[rel=prev]");
      if (!link) return;
      link.click();
    } else {
      return;
    }
    event.preventDefault();
  });
})();
