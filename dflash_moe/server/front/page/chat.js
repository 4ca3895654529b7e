// The chat: a conversation is sent whole with each turn, and its answer is shown as it comes. What the
// model writes is only ever put into text nodes, never read as HTML.
// SPDX-License-Identifier: Apache-2.0

const byId = (id) => document.getElementById(id);
const log = byId("log"), prompt = byId("prompt"), send = byId("send"), stop = byId("stop");

// Turns as the API has them. One without an answer is taken out again where it failed.
let messages = [];
// Of the answer that is under way.
let running = null;

function element(name, classes, text) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (text) made.textContent = text;
  return made;
}

// Shows a turn, and returns it with the text node that its text is added to.
function showTurn(who, classes, text) {
  byId("hint").hidden = true;
  const turn = element("article", `turn ${classes}`), body = element("p", "text"), node = document.createTextNode(text);
  body.append(node);
  turn.append(element("h3", "", who), body);
  log.append(turn);
  return { turn, body, node };
}

// Follows the text unless somebody has scrolled away from its end.
function following(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function announce(text) {
  byId("announce").textContent = text;
}

// Yields the content of each event of a stream. Lines are cut where they end, each byte is looked at once.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parts = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = value.split("\n");
    parts.push(lines.shift());
    for (const next of lines) {
      const line = parts.splice(0).join("");
      parts.push(next);
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const text = body?.error?.message ?? `the server has answered ${response.status}`;
  const retry = response.headers.get("retry-after");
  return new Error(retry ? `${text} (try again in ${retry} s)` : text);
}

function bodyOf() {
  const system = byId("system").value.trim(), temperature = byId("temperature"), most = byId("max-tokens");
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true, stream_options: { include_usage: true },
  };
  if (temperature.value !== "") body.temperature = temperature.valueAsNumber;
  if (most.value !== "") body.max_tokens = most.valueAsNumber;
  return body;
}

class Answer {
  constructor() {
    Object.assign(this, showTurn(byId("model").textContent, "answered", ""));
    this.turn.setAttribute("aria-busy", "true");
    this.began = performance.now();
    this.first = null;
    this.thought = null;
    this.usage = null;
    this.reason = null;
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    this.usage = event.usage ?? this.usage;
    for (const choice of event.choices ?? []) {
      this.first ??= performance.now();
      const { content, reasoning_content: thinking } = choice.delta ?? {};
      if (thinking) this.think(thinking);
      if (content) this.node.appendData(content);
      this.reason = choice.finish_reason ?? this.reason;
    }
  }

  think(text) {
    if (!this.thought) {
      const folded = element("details", "thought"), body = element("p", "text");
      this.thought = document.createTextNode("");
      body.append(this.thought);
      folded.append(element("summary", "", "Thoughts"), body);
      this.body.before(folded);
    }
    this.thought.appendData(text);
  }

  end(said) {
    const figures = [];
    if (this.usage) {
      const seconds = (performance.now() - (this.first ?? this.began)) / 1000, count = this.usage.completion_tokens;
      figures.push(`${count} tokens`);
      if (count > 1 && seconds > 0) figures.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      if (cached) figures.push(`${cached} of ${this.usage.prompt_tokens} cached`);
    }
    if (this.first) figures.push(`first after ${((this.first - this.began) / 1000).toFixed(2)} s`);
    if (said) figures.push(said);
    if (this.reason === "length") figures.push("ended at its most tokens");
    this.turn.setAttribute("aria-busy", "false");
    this.turn.append(element("p", "figures", figures.join(" · ")));
  }
}

async function ask(text) {
  const asked = showTurn("You", "asked", text), answer = new Answer();
  // Another chat may begin before this answer has ended.
  const turns = messages;
  turns.push({ role: "user", content: text });
  running = new AbortController();
  log.scrollTop = log.scrollHeight;
  setBusy(true);
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(bodyOf()), signal: running.signal,
    });
    if (!response.ok) throw await errorOf(response);
    for await (const event of events(response)) following(() => answer.take(event));
    if (!answer.reason) throw new Error("the answer has ended early: the server was cut off");
    following(() => answer.end());
    turns.push({ role: "assistant", content: answer.node.data });
    announce(answer.node.data);
  } catch (error) {
    following(() => failed(error, answer));
    // What there is of an answer stays in the conversation; a question without one goes back.
    if (answer.node.data) {
      turns.push({ role: "assistant", content: answer.node.data });
    } else {
      turns.pop();
      if (!prompt.value) prompt.value = text;
    }
  } finally {
    running = null;
    setBusy(false);
  }
}

function failed(error, answer) {
  if (error.name === "AbortError") {
    answer.end("stopped");
    announce("The answer was stopped.");
    return;
  }
  answer.end();
  const text = error instanceof TypeError ? "the server cannot be reached" : error.message;
  const shown = element("p", "error", `No ${answer.node.data ? "whole " : ""}answer: ${text}`);
  shown.setAttribute("role", "alert");
  answer.turn.append(shown);
}

function setBusy(isBusy) {
  send.hidden = isBusy;
  stop.hidden = !isBusy;
  fit();
  // Whoever has gone elsewhere meanwhile stays there; a button that is hidden has lost the focus.
  if ([document.body, send, stop].includes(document.activeElement)) prompt.focus();
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value;
  if (running || !text.trim()) return;
  prompt.value = "";
  ask(text);
});
prompt.addEventListener("keydown", (event) => {
  // Enter that ends a word of an input method sends nothing.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
prompt.addEventListener("input", fit);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
stop.addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  log.replaceChildren(byId("hint"));
  byId("hint").hidden = false;
  prompt.focus();
});
fit();
