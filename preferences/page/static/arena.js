// Shows two answers as they grow, keeps a message that is being typed, and sends with Ctrl and Enter. The pages work
// without this file: then they reload until both answers are there.
"use strict";

// A message survives a reload and the Back button, in this tab only, until it is sent.
function keepQuestion() {
  const box = document.getElementById("question");
  if (!box) return;
  const key = `arena ${location.pathname}`;
  if (!box.value) box.value = sessionStorage.getItem(key) ?? "";
  box.addEventListener("input", () => sessionStorage.setItem(key, box.value));
  box.form.addEventListener("submit", () => sessionStorage.removeItem(key));
}

// Replaces the page's content by the one that the server has now, so that it does not jump.
async function refresh(said) {
  const answer = await fetch(location.pathname, { headers: { Accept: "text/html" } });
  if (!answer.ok || answer.redirected) return location.reload();
  const found = new DOMParser().parseFromString(await answer.text(), "text/html");
  document.getElementById("main").replaceWith(found.getElementById("main"));
  start();
  document.getElementById("said").textContent = said;
}

function showLive() {
  const live = document.getElementById("live");
  if (!live) return;
  const boxes = [...live.querySelectorAll(".growing")];
  const source = new EventSource(live.dataset.events);
  source.onmessage = (event) => {
    JSON.parse(event.data).forEach((text, side) => { boxes[side].textContent = text; });
  };
  source.onerror = () => { // refused for good: as many windows as a person may have show events already
    if (source.readyState === EventSource.CLOSED) setTimeout(() => refresh("").catch(() => location.reload()), 2000);
  };
  source.addEventListener("over", () => {
    source.close();
    refresh("Both models have stopped writing.").catch(() => location.reload());
  });
}

function start() {
  keepQuestion();
  showLive();
}

document.addEventListener("keydown", (event) => {
  const form = event.target.closest?.("form.ask, form.verdict");
  if (form && event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    form.requestSubmit();
  }
});
start();
