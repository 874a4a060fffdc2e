// Keyboard shortcuts, drafts, and a button that copies the key. Every page works without this file.
"use strict";

// What was typed into a task's form survives a reload, the Back button and an unreachable server: only in this tab, and
// until another task is shown. A form that the server has filled in is left as it is.
function keepDraft() {
  const form = document.getElementById("answer");
  if (location.pathname === "/sign-in") sessionStorage.clear();
  if (!form) return;
  const key = `draft ${form.elements.task.value} ${form.elements.revision.value}`;
  const said = () => [...form.elements].filter((one) => one.type === "radio" || one.type === "checkbox" || one.id === "note");
  const isEmpty = said().every((one) => (one.id === "note" ? !one.value : !one.checked));
  const draft = sessionStorage.getItem(key);
  Object.keys(sessionStorage).filter((one) => one.startsWith("draft ") && one !== key).forEach((one) => sessionStorage.removeItem(one));
  if (draft && isEmpty) {
    const { ticked, note } = JSON.parse(draft);
    said().forEach((one) => {
      if (one.id === "note") one.value = note;
      else one.checked = ticked.includes(`${one.name}=${one.value}`);
    });
    form.querySelectorAll("details.marks").forEach((box) => { box.open = box.querySelector("input:checked") !== null; });
  }
  form.addEventListener("input", () => {
    const ticked = said().filter((one) => one.checked).map((one) => `${one.name}=${one.value}`);
    sessionStorage.setItem(key, JSON.stringify({ ticked, note: form.elements.note.value }));
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
  let chosen = 0;

  keys.hidden = false;
  switched.checked = localStorage.getItem("keys") !== "off";
  switched.addEventListener("change", () => localStorage.setItem("keys", switched.checked ? "on" : "off"));

  function choose(place) {
    chosen = place;
    responses.forEach((response, index) => response.classList.toggle("chosen", index === place));
    responses[place].scrollIntoView({ block: "nearest" });
    responses[place].focus({ preventScroll: true });
  }

  function give(name, value) {
    const box = form.querySelector(`input[name="${name}_${chosen}"][value="${value}"]`);
    if (!box) return;
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
      give(event.shiftKey ? "rating" : "rank", digit);
    } else if (letter >= 0 && letter < numResponses) {
      choose(letter);
    } else if (event.key.toUpperCase() === "M") {
      const box = responses[chosen].querySelector("details.marks");
      if (box) { box.open = true; box.querySelector("input")?.focus(); }
    } else if (event.key.toUpperCase() === "X") {
      const texts = [...document.querySelectorAll("details.exact")];
      const opens = texts.some((one) => !one.open);
      texts.forEach((one) => { one.open = opens; });
      said.textContent = opens ? "Exact texts" : "Formatted texts";
    } else if (event.key.toUpperCase() === "S") {
      const box = document.getElementById("skip-box");
      if (box) { box.open = true; document.getElementById("reason").focus(); }
    } else if (event.key.toUpperCase() === "N" || event.key.toUpperCase() === "P") {
      const link = document.querySelector(event.key.toUpperCase() === "N" ? "nav a[rel=next]" : "nav a[rel=prev]");
      if (!link) return;
      link.click();
    } else {
      return;
    }
    event.preventDefault();
  });
})();
