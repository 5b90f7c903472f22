// The "Process memory" sidebar tab: what docs/panel.md describes, shown live.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const EVENT = "process_memory";
const LOOK_AGAIN = 5000; // ms; each look also keeps the events coming
const POLL = 1000; // ms between looks while the websocket is down
const KINDS = {
  self: "this server",
  worker: "worker of this server",
  server: "another ComfyUI server",
  foreign_worker: "worker of another server",
  provider: "not a ComfyUI process",
};
const COLORS = 8; // in panel.css
const OTHER = "Other programs and unaccounted";
const LEGEND = [["pm-claimed pm-claim", "Claimed, not yet allocated"], ["pm-other", OTHER]];

const size = (bytes) => {
  if (bytes == null) return "unknown";
  const mb = bytes / 1024 ** 2;
  return mb >= 1024 ? `${(mb / 1024).toFixed(1)} GB` : `${mb > 0 && mb < 10 ? mb.toFixed(1) : Math.round(mb)} MB`;
};

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

// Only what differs is written, so that a selection, the focus and a screen reader stay where they are.
function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function attribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

// Makes the children of `parent` those that `create` gives for the keys, reusing what is there.
function keyed(parent, items, keyOf, create, update) {
  const known = new Map();
  for (const child of [...parent.children]) {
    if (known.has(child.dataset.key)) child.remove();
    else known.set(child.dataset.key, child);
  }
  items.forEach((item, index) => {
    const key = String(keyOf(item));
    let child = known.get(key);
    known.delete(key);
    if (!child) {
      child = create(item);
      child.dataset.key = key;
    }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update(child, item);
  });
  for (const child of known.values()) child.remove();
}

class Bar {
  constructor() {
    this.element = make("section", "pm-device");
    const head = make("div", "pm-head");
    this.title = make("h3");
    this.figures = make("span", "pm-figures");
    this.bar = make("div", "pm-bar");
    this.bar.setAttribute("role", "img");
    head.append(this.title, this.figures);
    this.element.append(head, this.bar);
  }

  // parts: [{key, color, bytes, label, claim}]
  show(title, total, free, parts) {
    const scale = Math.max(total, parts.reduce((sum, part) => sum + part.bytes, 0), 1);
    const shown = parts.filter((part) => part.bytes > 0);
    write(this.title, title);
    write(this.figures, `${size(free)} free of ${size(total)}`);
    const words = shown.map((part) => `${part.label} ${size(part.bytes)}`);
    attribute(this.bar, "aria-label", `${title}: ${[...words, `free ${size(free)}`].join(", ")}; ${size(total)} in all`);
    keyed(this.bar, shown, (part) => part.key, () => make("span"), (span, part) => {
      span.className = `pm-part ${part.color}${part.claim ? " pm-claim" : ""}`;
      span.style.width = `${(100 * part.bytes) / scale}%`;
      span.title = `${part.label}: ${size(part.bytes)}`;
    });
  }
}

class Process {
  constructor(panel) {
    this.panel = panel;
    this.element = make("li", "pm-process");
    const head = make("div", "pm-head");
    this.swatch = make("span");
    this.name = make("h4");
    this.state = make("span", "pm-state");
    this.name.append(this.swatch, (this.nameText = make("span")));
    head.append(this.name, this.state);
    this.about = make("p", "pm-about");
    this.figures = make("dl");
    this.models = make("ul", "pm-models");
    this.buttons = make("div", "pm-buttons");
    this.release = this.button("Release memory", () => this.panel.release(this.row));
    this.restart = this.button("Restart", () => this.panel.restart(this.row));
    this.element.append(head, this.about, this.figures, this.models, this.buttons);
  }

  button(text, action) {
    const button = make("button", "", text);
    button.type = "button";
    button.addEventListener("click", async () => {
      if (button.getAttribute("aria-disabled") === "true") return;
      attribute(button, "aria-disabled", "true");
      try {
        await action();
      } finally {
        button.removeAttribute("aria-disabled");
      }
    });
    return button;
  }

  offer(buttons) {
    for (const button of [...this.buttons.children]) if (!buttons.includes(button)) button.remove();
    buttons.forEach((button, index) => {
      if (this.buttons.children[index] !== button) this.buttons.insertBefore(button, this.buttons.children[index] ?? null);
    });
  }

  show(row, data) {
    this.row = row;
    this.swatch.className = `pm-swatch ${this.panel.color(row)}`;
    write(this.nameText, row.name);
    write(this.state, row.state);
    attribute(this.state, "data-state", row.state);
    const packs = row.packs.length ? `, runs ${row.packs.join(", ")}` : "";
    const age = row.state === "silent" && row.age != null ? `, last heard of ${Math.round(row.age)} s ago` : "";
    write(this.about, `${KINDS[row.kind] ?? row.kind}${row.pid == null ? "" : `, pid ${row.pid}`}${packs}${age}`);
    keyed(this.figures, [...facts(row, data)], ([term]) => term, () => {
      const pair = make("div");
      pair.append(make("dt"), make("dd"));
      return pair;
    }, (pair, [term, text]) => {
      write(pair.children[0], term);
      write(pair.children[1], text);
    });
    keyed(this.models, row.models.map((model, index) => [index, model]), ([index]) => index, () => {
      const item = make("li");
      item.append(make("span"), make("span", "pm-figures"));
      return item;
    }, (item, [, model]) => {
      const place = data.devices.length > 1 ? ` on ${label(data, model.device)}` : "";
      write(item.children[0], `${model.name}${model.in_use ? " (in use)" : ""}`);
      write(item.children[1], `${size(model.resident)} of ${size(model.size)}${place}`);
    });
    this.models.hidden = !row.models.length;
    this.models.setAttribute("aria-label", `Models of ${row.name}: how much of each is loaded`);
    const worker = row.kind === "worker";
    this.offer([...(worker && row.pid == null ? [] : [this.release]), ...(worker && row.pid != null ? [this.restart] : [])]);
    attribute(this.release, "aria-label", `Release memory of ${row.name}`);
    attribute(this.restart, "aria-label", `Restart ${row.name}`);
  }
}

function* facts(row, data) {
  for (const figures of row.devices) {
    const place = data.devices.length > 1 ? ` on ${label(data, figures.device)}` : "";
    yield [`In use${place}`, size(figures.vram)];
    if (figures.cached) yield [`Cached, unused${place}`, size(figures.cached)];
    if (figures.claimed) yield [`Claimed${place}`, size(figures.claimed)];
    yield [`Can give back${place}`, size(figures.reclaimable)];
  }
  yield ["RAM", size(row.ram)];
  if (row.pinned) yield ["Pinned RAM", size(row.pinned)];
}

// The front end's own question has no button that says what it does.
function ask(title, message, action) {
  const dialog = make("dialog", "pm-panel pm-dialog");
  const [heading, text, buttons] = [make("h2", "", title), make("p", "", message), make("div", "pm-buttons")];
  dialog.setAttribute("role", "alertdialog");
  dialog.setAttribute("aria-label", title);
  for (const [label, value] of [["Cancel", ""], [action, "yes"]]) {
    const button = make("button", "", label);
    button.type = "button";
    button.addEventListener("click", () => dialog.close(value));
    buttons.append(button);
  }
  dialog.append(heading, text, buttons);
  // The front end has shortcuts for keys.
  dialog.addEventListener("keydown", (event) => event.stopPropagation());
  return new Promise((answer) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      answer(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

function label(data, place) {
  return data.devices.find((device) => device.device === place)?.name.split(" ")[0] ?? place;
}

class Panel {
  constructor() {
    this.element = make("div", "pm-panel");
    this.element.setAttribute("role", "region");
    this.element.setAttribute("aria-labelledby", "pm-title");
    const title = make("h2", "", "Process memory");
    title.id = "pm-title";
    this.status = make("p", "pm-status");
    this.status.setAttribute("role", "status");
    this.bars = make("div");
    this.note = make("p", "pm-about");
    this.legend = make("p", "pm-legend");
    for (const [part, meaning] of LEGEND) {
      const entry = make("span");
      entry.append(make("span", `pm-swatch ${part}`), meaning);
      this.legend.append(entry);
    }
    this.list = make("ul", "pm-processes");
    this.list.setAttribute("aria-label", "Processes");
    this.element.append(title, this.status, this.bars, this.legend, this.list, this.note);
    this.colors = new Map();
    this.timer = null;
    this.onEvent = (event) => this.show(event.detail);
    this.onVisibility = () => (document.hidden ? this.pause() : this.look());
  }

  open(parent) {
    // The front end calls this at every rendering of its own.
    if (this.element.parentElement !== parent) parent.replaceChildren(this.element);
    if (this.opened) return;
    this.opened = true;
    api.addEventListener(EVENT, this.onEvent);
    document.addEventListener("visibilitychange", this.onVisibility);
    this.look();
  }

  close() {
    this.opened = false;
    this.pause();
    api.removeEventListener(EVENT, this.onEvent);
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.element.remove();
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
  }

  async look() {
    this.pause();
    const timer = (this.timer = setTimeout(() => this.look(), api.socket?.readyState === WebSocket.OPEN ? LOOK_AGAIN : POLL));
    try {
      const answer = await api.fetchApi(`/process_memory?watch=${encodeURIComponent(api.clientId ?? "")}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
      const data = await answer.json();
      if (this.opened) this.show(data);
      if (this.silent) this.say("");
      this.silent = false;
    } catch (error) {
      if (!this.opened) return;
      if (!this.silent) this.say(`The server does not answer (${error.message}). Trying again.`, true);
      this.silent = true;
      this.element.classList.add("pm-stale");
      if (this.timer === timer) {
        clearTimeout(timer);
        this.timer = setTimeout(() => this.look(), POLL);
      }
    }
  }

  color(row) {
    const key = row.pid ?? row.name;
    if (!this.colors.has(key)) this.colors.set(key, `pm-color-${this.colors.size % COLORS}`);
    return this.colors.get(key);
  }

  show(data) {
    this.element.classList.remove("pm-stale");
    const bars = data.devices.map((device) => ({ ...device, key: device.device, parts: this.parts(data, device) }));
    bars.push({ ...data.ram, key: "ram", name: "RAM", parts: this.ramParts(data) });
    keyed(this.bars, bars, (bar) => bar.key, () => {
      const bar = new Bar();
      bar.element.view = bar;
      return bar.element;
    }, (element, bar) => element.view.show(bar.name, bar.total, bar.free, bar.parts));
    keyed(this.list, data.processes, (row) => row.pid ?? row.name, () => {
      const process = new Process(this);
      process.element.view = process;
      return process.element;
    }, (element, row) => element.view.show(row, data));
    write(this.note, data.processes.length > 1 ? "" : "No other process shares this machine's memory with this server.");
  }

  parts(data, { device, other }) {
    const parts = [];
    for (const row of data.processes) {
      for (const figures of row.devices.filter((f) => f.device === device)) {
        const key = row.pid ?? row.name;
        parts.push({ key: `${key} held`, color: this.color(row), bytes: figures.vram ?? 0, label: row.name });
        parts.push({ key: `${key} claim`, color: this.color(row), bytes: figures.claimed ?? 0, label: `${row.name}, claimed`, claim: true });
      }
    }
    parts.push({ key: "other", color: "pm-other", bytes: other, label: OTHER });
    return parts;
  }

  ramParts({ ram, processes }) {
    const parts = processes.map((row) => ({ key: row.pid ?? row.name, color: this.color(row), bytes: row.ram ?? 0, label: row.name }));
    const other = ram.total - ram.free - parts.reduce((sum, part) => sum + part.bytes, 0);
    return [...parts, { key: "other", color: "pm-other", bytes: Math.max(0, other), label: OTHER }];
  }

  say(text, alarm = false) {
    write(this.status, text);
    this.status.classList.toggle("pm-alarm", alarm);
  }

  async post(path, body) {
    const answer = await api.fetchApi(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
    const value = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(value.error ?? `${answer.status} ${answer.statusText}`);
    return value;
  }

  async act(doing, path, body, done) {
    this.say(doing);
    try {
      this.say(done(await this.post(path, body)));
    } catch (error) {
      this.say(error.message, true);
    }
    if (this.opened) await this.look();
  }

  release(row) {
    const who = row.pid == null ? { name: row.name } : { pid: row.pid };
    return this.act(`Asking ${row.name} for its memory...`, "/process_memory/release", who, ({ outcome, freed }) =>
      ({ freed: `${row.name} gave back ${size(freed)}.`, gone: `${row.name} has ended.` })[outcome] ?? `${row.name} had nothing to give back.`);
  }

  async restart(row) {
    if (row.state === "busy") {
      const message = `A node is running in ${row.name}. The prompt that it belongs to will fail.`;
      if (!(await ask(`Restart ${row.name}?`, message, "Restart"))) return;
    }
    await this.act(`Restarting ${row.name}...`, "/process_memory/restart", { pid: row.pid }, ({ name, pid }) => `${name} is starting, pid ${pid}.`);
  }
}

function style() {
  const link = make("link");
  link.rel = "stylesheet";
  link.href = new URL("panel.css", import.meta.url).href;
  document.head.append(link);
}

app.registerExtension({
  name: "comfy_multiproc.ProcessMemory",
  setup() {
    style();
    const panel = new Panel();
    app.extensionManager.registerSidebarTab({
      id: "process-memory",
      icon: "pi pi-chart-bar",
      title: "Memory",
      tooltip: "Process memory",
      type: "custom",
      render: (parent) => panel.open(parent),
      destroy: () => panel.close(),
    });
  },
});
