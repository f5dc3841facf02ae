// The status page's connection: reads snapshots as server-sent events, asks for a key where one is needed, and comes
// back when the connection is lost. They are fetched, not listened to by EventSource, which cannot show a key.

import { show } from "./view.js";

const RETRY_S = [1, 2, 4, 8];
const SILENCE_MS = 6000; // Snapshots come twice a second.
const KEY = "ringserve-key";
const $ = (id) => document.getElementById(id);

function connection(state, text) {
  const [pill, words] = [$("connection"), $("connection-text")];
  // A reader's voice tells each change once.
  if (pill.dataset.state !== state) pill.dataset.state = state;
  if (words.textContent !== text) words.textContent = text;
  $("main").classList.toggle("stale", state === "lost");
}

class KeyWanted extends Error {}

let abort = new AbortController();

/** Shows snapshots until the stream ends or falls silent. Calls `heard` for each. */
async function watch(heard) {
  abort = new AbortController();
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : { authorization: `Bearer ${key}` };
  let silent = setTimeout(() => abort.abort(), SILENCE_MS);
  try {
    // Without credentials, so that no browser's dialog asks for what the form below asks for.
    const how = { headers, signal: abort.signal, cache: "no-store", credentials: "omit" };
    const answer = await fetch("/status/events", how);
    if (answer.status === 401 || answer.status === 403) throw new KeyWanted();
    if (!answer.ok) throw new Error(`the server says ${answer.status}`);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(silent);
      silent = setTimeout(() => abort.abort(), SILENCE_MS);
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      const last = parts.filter((part) => part.startsWith("data: ")).pop();
      if (last === undefined) continue;
      show(JSON.parse(last.slice(6)), key !== null);
      heard();
    }
  } finally {
    clearTimeout(silent);
    abort.abort();
  }
}

function askForKey() {
  const form = $("key-form");
  $("key-wrong").hidden = sessionStorage.getItem(KEY) === null;
  connection("key", "key needed");
  form.hidden = false;
  $("key").focus();
  return new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, $("key").value);
      $("key").value = "";
      form.hidden = true;
      resolve();
    };
  });
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Nobody looks at a hidden page: it makes the server take no snapshots. */
function seen() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) abort.abort();
});

async function run() {
  let failures = 0;
  for (;;) {
    await seen();
    try {
      await watch(() => {
        failures = 0;
        connection("live", "live");
      });
    } catch (error) {
      if (error instanceof KeyWanted) {
        await askForKey();
        continue;
      }
    }
    if (document.hidden) continue;
    const wait = RETRY_S[Math.min(failures, RETRY_S.length - 1)];
    failures += 1;
    connection("lost", "connection lost, retrying");
    await pause(1000 * wait);
  }
}

run();
