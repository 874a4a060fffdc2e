// Follows a run: what it is doing now every few seconds, and the rest of the page when it has changed.
"use strict";
(() => {
  const EVERY_MS = 2000;
  let version = document.getElementById("now").dataset.version;

  // What identifies a fold from one version of the page to the next.
  function nameOf(fold) {
    const anchor = fold.querySelector("[id]")?.id ?? "";
    const title = fold.classList.contains("sample") ? "" : fold.querySelector("summary").textContent;
    return `${fold.className}|${anchor}|${title}`;
  }

  function keep(old, next) {
    const folds = new Map([...old.querySelectorAll("details")].map((fold) => [nameOf(fold), fold.open]));
    for (const fold of next.querySelectorAll("details")) fold.open = folds.get(nameOf(fold)) ?? fold.open;
    const forms = [...old.querySelectorAll(".filters")];
    [...next.querySelectorAll(".filters")].forEach((form, place) => {
      for (const field of form.elements) {
        const was = field.name && forms[place]?.elements.namedItem(field.name);
        if (was && field.type === "checkbox") field.checked = was.checked;
        else if (was && field.type !== "button") field.value = was.value;
      }
    });
  }

  async function replace(newVersion) {
    const main = document.querySelector("main");
    if (main.contains(document.activeElement) && document.activeElement.matches("input, select")) return;
    const page = new DOMParser().parseFromString(await (await fetch("/")).text(), "text/html");
    keep(main, page.querySelector("main"));
    page.getElementById("now").replaceWith(document.getElementById("now"));
    for (const name of ["svg.unseen", "header", "main"]) {
      document.querySelector(name).replaceWith(document.adoptNode(page.querySelector(name)));
    }
    version = newVersion;
    document.dispatchEvent(new Event("heed:replaced"));
  }

  async function tick() {
    const now = document.getElementById("now");
    try {
      const found = await (await fetch("/now")).json();
      now.innerHTML = found.html;
      if (found.version !== version) await replace(found.version);
    } catch {
      now.querySelector(".verdict").textContent = "heed watch has ended or cannot be reached.";
    }
    setTimeout(tick, EVERY_MS);
  }

  setTimeout(tick, EVERY_MS);
})();
