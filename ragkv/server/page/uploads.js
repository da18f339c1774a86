// Files are dropped or chosen, sent, and ingested by a job that is watched and can be cancelled.

import { ask, events, pathOf, upload } from "./api.js";
import { announce, byId, counted, el, plain } from "./dom.js";

const ENDED = ["done", "failed", "cancelled", "interrupted"];
const MOST_SHOWN = 8;
let index = null;
let onChange = () => {};
let watching = null;

/** Wire the places for files; `changed` is called when an ingest has ended, `shown` when files were dropped. */
export function setUpUploads(changed, shown) {
  onChange = changed;
  const field = byId("files");
  field.addEventListener("change", () => {
    send([...field.files]);
    field.value = "";
  });
  const veil = byId("veil");
  const carries = (event) => index?.writable && [...(event.dataTransfer?.types ?? [])].includes("Files");
  let depth = 0;
  const over = (by) => {
    depth = by === 0 ? 0 : depth + by;
    veil.hidden = depth === 0;
  };
  addEventListener("dragenter", (event) => carries(event) && over(1));
  addEventListener("dragleave", (event) => carries(event) && over(-1));
  addEventListener("dragover", (event) => event.preventDefault()); // else the browser leaves for the file
  addEventListener("drop", (event) => {
    event.preventDefault();
    if (!carries(event)) return;
    over(0);
    shown();
    send([...event.dataTransfer.files]);
  });
}

/** Send files to this index from now on, and show its jobs. */
export async function uploadsOf(facts) {
  watching?.abort();
  watching = new AbortController();
  const { signal } = watching;
  index = facts;
  byId("veil-name").textContent = facts.name;
  byId("jobs").replaceChildren();
  if (!facts.writable) return;
  const { jobs } = await ask(pathOf(facts.name, "jobs"), { signal });
  for (const job of jobs.slice(0, MOST_SHOWN).reverse()) {
    const item = new Item(job.files);
    item.tell(job);
    if (!ENDED.includes(job.state)) watch(facts.name, job.id, item, signal);
  }
}

async function send(files) {
  if (!files.length) return;
  const { name } = index;
  const { signal } = watching;
  const item = new Item(files.map((file) => file.name));
  const sending = new AbortController();
  item.onCancel = () => sending.abort();
  try {
    const { job } = await upload(pathOf(name, "documents"), files, {
      signal: sending.signal,
      onSent: (share) => item.show("Sending", share),
    });
    await watch(name, job.id, item, signal);
  } catch (error) {
    item.end(error.name === "AbortError" ? "Cancelled before it was sent" : error.message, error.name !== "AbortError");
  }
}

async function watch(name, id, item, signal) {
  const path = pathOf(name, "jobs", id);
  item.onCancel = () => ask(path, { method: "DELETE" }).catch((error) => item.note(error.message));
  let last = null;
  try {
    for await (const [, { job }] of events(`${path}/events`, { signal })) {
      last = job;
      item.tell(job);
    }
    if (!ENDED.includes(last?.state)) item.note("The connection broke; reload the page to see what became of it.");
    else onChange(name);
  } catch (error) {
    if (error.name !== "AbortError") item.note(error.message);
  }
}

/** One upload in the list. */
class Item {
  constructor(names) {
    const all = names.map(plain);
    this.name = all.length === 1 ? all[0] : `${all[0]} and ${counted(all.length - 1, "other")}`;
    this.state = el("span", { class: "job-state quiet" }, "Waiting");
    this.bar = el("progress", { max: 1, value: 0, "aria-label": `Progress of ${this.name}` });
    this.cancel = el("button", { type: "button", class: "plain", "aria-label": `Cancel ${this.name}` }, "Cancel");
    this.cancel.addEventListener("click", () => {
      this.cancel.disabled = true;
      this.note("Cancelling");
      this.onCancel();
    });
    this.detail = el("ul", { class: "job-detail" });
    this.node = el("li", { class: "job" }, el("span", { class: "job-name", title: all.join("\n") }, this.name), this.state, this.bar, this.cancel, this.detail);
    byId("jobs").prepend(this.node);
    while (byId("jobs").children.length > MOST_SHOWN) byId("jobs").lastElementChild.remove();
  }

  show(said, share) {
    this.state.textContent = `${said}, ${Math.round(share * 100)} %`;
    this.bar.value = share;
  }

  note(said) {
    this.state.textContent = said;
  }

  /** What the server tells of the job. */
  tell(job) {
    if (job.state === "queued") this.note("Waiting for its turn");
    else if (job.state === "running") this.show("Encoding", job.total ? job.done / job.total : 0);
    else {
      this.end(ending(job), job.state === "failed" || job.state === "interrupted");
      this.bar.value = job.state === "done" ? 1 : this.bar.value;
      const missing = [...(job.report?.skipped ?? []), ...(job.report?.left_out ?? [])];
      this.detail.replaceChildren(...missing.map(({ path, reason }) => el("li", {}, plain(`${path}: ${reason}`))));
    }
  }

  end(said, failed) {
    this.node.classList.add("over");
    this.node.classList.toggle("failed", failed);
    this.state.textContent = said;
    if (this.cancel.matches(":focus")) byId("files").focus();
    this.cancel.remove();
    this.bar.hidden = true;
    announce(`${this.name}: ${said}`);
  }
}

function ending(job) {
  if (job.state === "cancelled") return kept("Cancelled", job.report);
  if (job.state !== "done") return job.error ?? "It failed.";
  const { added, updated, unchanged, skipped, chunks } = job.report;
  const parts = [
    added.length && `${added.length} added`,
    updated.length && `${updated.length} replaced`,
    unchanged.length && `${unchanged.length} unchanged`,
    skipped.length && `${skipped.length} left out`,
    chunks && counted(chunks, "chunk"),
  ];
  return parts.filter(Boolean).join(", ") || "Nothing to add";
}

function kept(said, report) {
  const stays = (report?.added.length ?? 0) + (report?.updated.length ?? 0);
  return stays ? `${said}; ${counted(stays, "document")} had been added` : said;
}
