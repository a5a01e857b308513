// The state of the fleet: a whole snapshot first, then changes.

const SILENCE_MS = 6000; // a snapshot comes every second
const HISTORY_SECONDS = 600;
const ROWS = ["pools", "workers"];

export class Live extends EventTarget {
  constructor() {
    super();
    this.state = null;
    this.offset = 0; // from our clock to the fleet's, in seconds
    this.contact = "connecting";
    this.since = Date.now();
    this.why = "";
    this.pause = 1000;
    setInterval(() => this.#watch(), 1000);
  }

  now() { return Date.now() / 1000 + this.offset; }

  connect() {
    this.source?.close();
    this.source = new EventSource("/api/live");
    this.opened = Date.now();
    this.source.onmessage = (event) => this.#told(JSON.parse(event.data));
    this.source.onerror = () => {
      this.#lost("the web process does not respond");
      if (this.source.readyState === EventSource.CLOSED) this.#ask();
    };
  }

  // EventSource does not say why it was refused: ask once more.
  async #ask() {
    const stop = new AbortController();
    try {
      const answer = await fetch("/api/live", { signal: stop.signal, cache: "no-store" });
      if (!answer.ok) this.#lost((await answer.json()).error ?? `HTTP ${answer.status}`);
    } catch { /* unreachable: already shown */ }
    stop.abort();
    this.pause = Math.min(this.pause * 2, 15000);
    setTimeout(() => this.connect(), this.pause);
  }

  #told(news) {
    this.heard = Date.now();
    this.pause = 1000;
    if (news.points) this.state = { ...news };
    else if (this.state) this.#merge(news);
    else return;
    if (news.at) this.offset = news.at - Date.now() / 1000;
    this.#contact("live", "");
    this.dispatchEvent(new CustomEvent("news", { detail: news }));
  }

  #merge(news) {
    for (const [name, value] of Object.entries(news)) {
      if (ROWS.includes(name)) {
        for (const [key, row] of Object.entries(value)) {
          if (row === null) delete this.state[name][key];
          else this.state[name][key] = row;
        }
      } else if (name === "point") {
        const points = this.state.points;
        points.push(value);
        while (points[0][0] < value[0] - HISTORY_SECONDS) points.shift();
      } else this.state[name] = value;
    }
  }

  #watch() {
    const silent = Date.now() - Math.max(this.heard ?? 0, this.opened ?? 0);
    if (silent > SILENCE_MS && this.contact !== "lost") this.#lost("no updates");
    if (silent > 4 * SILENCE_MS && this.source?.readyState === EventSource.OPEN) this.connect();
    this.dispatchEvent(new Event("second"));
  }

  #lost(why) {
    if (this.contact === "lost" && this.why !== "no updates" && why === "the web process does not respond") return;
    this.#contact("lost", why);
  }

  #contact(contact, why) {
    if (contact === this.contact && why === this.why) return;
    if (contact !== this.contact) this.since = Date.now();
    this.contact = contact;
    this.why = why;
    this.dispatchEvent(new Event("contact"));
  }
}
