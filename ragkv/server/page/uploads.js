// Files and folders are dropped or chosen, sent, and ingested by jobs that are watched and can be cancelled.

import { ask, events, pathOf, upload } from "./api.js";
import { announce, byId, counted, el, plain, warn } from "./dom.js";

const ENDED = ["done", "failed", "cancelled", "interrupted"];
const MOST_SHOWN = 8;
const MOST_FILES = 64; // at a time, as the server takes them
const MOST_BYTES = 64 << 20; // at a time, of several files
let index = null;
let onChange = () => {};
let watching = null;

/** Wire the places for files; `changed` is called when an ingest has ended, `shown` when files were dropped. */
export function setUpUploads(changed, shown) {
  onChange = changed;
  for (const field of [byId("files"), byId("folder")]) {
    field.addEventListener("change", () => {
      shown();
      send([...field.files].map((file) => [file.webkitRelativePath || file.name, file]));
      field.value = "";
    });
  }
  byId("choose-folder").addEventListener("click", () => byId("folder").click());
  const veil = byId("veil");
  const files = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const carries = (event) => index?.writable && files(event);
  let depth = 0;
  const over = (by) => {
    depth = by === 0 ? 0 : depth + by;
    veil.hidden = depth === 0;
  };
  addEventListener("dragenter", (event) => carries(event) && over(1));
  addEventListener("dragleave", (event) => carries(event) && over(-1));
  addEventListener("dragover", (event) => files(event) && event.preventDefault()); // else the browser leaves for the file
  addEventListener("drop", (event) => {
    if (files(event)) event.preventDefault();
    if (!carries(event)) return;
    over(0);
    shown();
    const dropped = [...event.dataTransfer.items].filter(({ kind }) => kind === "file");
    // what an item is has to be asked before the event is over
    const entries = dropped.map((item) => item.webkitGetAsEntry?.() ?? item.getAsFile());
    Promise.all(entries.map(inside)).then((found) => send(found.flat()), (error) => warn(error.message));
  });
}

/** The files of what was dropped, with their names: in a folder, their paths from it on. */
async function inside(entry) {
  if (entry instanceof File) return [[entry.name, entry]];
  if (entry.isFile) {
    return [[entry.fullPath.replace(/^\//, ""), await new Promise((done, failed) => entry.file(done, failed))]];
  }
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const some = await new Promise((done, failed) => reader.readEntries(done, failed)); // a hundred at a time
    if (!some.length) return (await Promise.all(found.map(inside))).flat();
    found.push(...some);
  }
}

/** Parts that may be sent at a time. */
function parted(files) {
  const parts = [];
  let bytes = Infinity;
  for (const each of files) {
    if (bytes + each[1].size > MOST_BYTES || parts.at(-1).length === MOST_FILES) {
      parts.push([]);
      bytes = 0;
    }
    parts.at(-1).push(each);
    bytes += each[1].size;
  }
  return parts;
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

/** Send files, pairs of name and file, one part after another; hidden ones of folders stay out, as of `ragkv ingest`. */
async function send(files) {
  const parts = parted(files.filter(([name]) => !/(?:^|\/)\.[^/]*(?=\/)|\/\.[^/]*$/.test(name)));
  const { name } = index;
  const { signal } = watching;
  if (files.length && !parts.length) warn("There is no file in the folder.");
  for (const [place, part] of parts.entries()) {
    if (signal.aborted) {
      warn(`${counted(parts.slice(place).flat().length, "file")} for ${plain(name)} were not sent, because another index was chosen meanwhile.`);
      return;
    }
    const of = parts.length > 1 ? `, part ${place + 1} of ${parts.length}` : "";
    if (!(await sendPart(name, part, of, signal))) return;
  }
}

/** Whether it was not cancelled. */
async function sendPart(name, files, of, signal) {
  const item = new Item(files.map(([each]) => each), of);
  const sending = new AbortController();
  item.onCancel = () => sending.abort();
  try {
    const { job } = await upload(pathOf(name, "documents"), files, {
      signal: sending.signal,
      onSent: (share) => item.show("Sending", share),
    });
    return (await watch(name, job.id, item, signal)) !== "cancelled";
  } catch (error) {
    item.end(error.name === "AbortError" ? "Cancelled before it was sent" : error.message, error.name !== "AbortError");
    return error.name !== "AbortError";
  }
}

/** Show what becomes of a job; its last state. */
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
  return last?.state;
}

/** One upload in the list. */
class Item {
  constructor(names, of = "") {
    const all = names.map(plain);
    this.name = (all.length === 1 ? all[0] : `${all[0]} and ${counted(all.length - 1, "other")}`) + of;
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
    const over = byId("jobs").querySelectorAll(".over"); // what is under way can be cancelled
    if (byId("jobs").children.length > MOST_SHOWN) over[over.length - 1]?.remove();
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
