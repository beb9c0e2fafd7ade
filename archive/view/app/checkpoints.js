// The checkpoints of a run over time, one of them in full, and what would be done with it on another number of ranks.

import * as address from "./address.js";
import { ask } from "./api.js";
import { checkpointList } from "./checkpointlist.js";
import { columns } from "./columns.js";
import { cut, el, fill, table } from "./dom.js";
import { facts } from "./facts.js";
import { flow, rankBars } from "./flow.js";
import { forgetting } from "./forgetting.js";
import * as format from "./format.js";
import * as keys from "./keys.js";
import { turns } from "./newest.js";
import { planning } from "./planning.js";
import { saved } from "./saved.js";
import { failed } from "./status.js";
import { timeline } from "./timeline.js";
import { tree } from "./tree.js";

export class Page {
  constructor(main, about, given, signal) {
    Object.assign(this, { given, signal, turn: turns(signal) });
    this.list = el("div");
    this.forgetting = forgetting(given, signal);
    this.one = el("div.one");
    fill(
      main,
      el("div.checkpoints", el("h1.unseen", "Checkpoints"), el("div.timelines", this.list, this.forgetting), this.one),
    );
    keys.bind("Checkpoints", this.keys(), signal);
  }

  /** Another checkpoint of the same, or another plan of it. */
  update(given) {
    if (given.run !== this.given.run || given.commit !== this.given.commit) return false;
    this.given = given;
    if (this.found) this.draw();
    return true;
  }

  /** A newer commit is there: who looks at the newest checkpoint sees the one that came. */
  news() {
    return this.load();
  }

  keys() {
    const ranks = async () => {
      await this.drawn; // a key may come before its field is drawn
      document.getElementById("target-ranks")?.select();
    };
    return [
      { keys: ["ArrowDown", "ArrowRight", "j"], does: "newer checkpoint", run: () => this.step(1) },
      { keys: ["ArrowUp", "ArrowLeft", "k"], does: "older checkpoint", run: () => this.step(-1) },
      { keys: ["Home"], does: "the first checkpoint of the run", run: () => this.step(-Infinity) },
      { keys: ["End"], does: "the newest of the run", run: () => this.step(Infinity) },
      { keys: ["r"], does: "plan for another number of ranks", run: ranks },
      {
        keys: ["Enter"],
        does: "its episodes",
        run: () => this.picked && address.go("episodes", { checkpoint: this.picked.commit }),
      },
    ];
  }

  async load() {
    this.found = await ask("checkpoints", { commit: this.given.commit, run: this.given.run }, this.signal);
    this.draw();
  }

  get picked() {
    const number = Number(this.given.number);
    return this.found.find((one) => one.commit === number) ?? this.found.at(-1);
  }

  step(way) {
    const mine = this.found.filter((one) => one.run === this.picked?.run);
    const next = mine[Math.max(0, Math.min(mine.length - 1, mine.indexOf(this.picked) + way))];
    if (next) this.pick(next);
  }

  pick(one) {
    address.turn({ number: one.commit });
  }

  draw() {
    return (this.drawn = this._draw(this.turn()));
  }

  async _draw(signal) {
    const runs = [...new Set(this.found.map((one) => one.run))];
    fill(
      this.list,
      runs.map((run) =>
        timeline(
          run,
          this.found.filter((one) => one.run === run),
          this.picked,
          (one) => this.pick(one),
        ),
      ),
      runs.length
        ? checkpointList(this.found, this.picked, (one) => this.pick(one))
        : el("p", "There are no checkpoints yet."),
    );
    this.list.querySelector("tr[aria-current]")?.scrollIntoView({ block: "nearest" });
    if (!this.picked) return;
    try {
      const found = await ask("checkpoint", { commit: this.given.commit, number: this.picked.commit }, signal);
      this.tell(found, signal);
      await Promise.all([this.plan(signal), this.tails(signal)]);
    } catch (error) {
      failed(error);
    }
    if (signal.aborted) return;
    this.one.parentNode.classList.add("ready");
  }

  tell(found, signal) {
    const [one, { changed }] = [this.picked, found];
    const heading = el(
      "h2",
      cut(one.name, 80),
      " ",
      one.tags.map((tag) => el("span.tag", cut(tag, 40))),
      one.whole ? null : el("span.tag.bad", "partial"),
      one.replay_saved ? null : el("span.tag", "without buffers"),
    );
    const buffers = Object.entries(found.buffers).map(([name, buffer]) => [
      cut(name, 40),
      format.count(buffer.steps),
      format.count(buffer.episodes),
      cut(buffer.columns.join(", "), 120),
    ]);
    this.planned = el("section.planned", { "aria-label": "Resume on another number of ranks" });
    this.tailed = el("section");
    const episodes = el("a", { href: address.of("episodes", { checkpoint: one.commit }) }, "its episodes");
    fill(
      this.one,
      heading,
      el("p.quiet-text", `${_when(one)} · run ${cut(one.run, 40)} · commit ${one.commit} · `, episodes),
      one.resumed ? _resumed(one, this.given.commit, signal) : null,
      el("h3", "Live steps of each rank"),
      rankBars(found.ranks),
      el("h3", "Buffers"),
      table({ buffer: "name", steps: "number", episodes: "number", columns: "text" }, buffers),
      columns(found.buffers, { commit: this.given.commit, number: one.commit }, signal),
      changed ? [el("h3", `Since ${cut(changed.since.name, 40)}`), facts(_changes(changed, one, found.written))] : null,
      this.planned,
      this.tailed,
      _folded("Left out", found.discarded),
      _folded("Progress", found.progress),
      _folded("Metrics", one.metrics),
      _folded("Lineage", found.lineage),
      _folded("About", found.about),
    );
  }

  plan(signal) {
    const one = this.picked;
    const why = one.whole ? "was saved without its buffers" : "is partial: not all of its ranks saved";
    if (saved && !Object.hasOwn(saved.answers, `plan ${one.commit}`)) return null;
    if (!one.replay_saved || !one.whole)
      return fill(this.planned, el("p.quiet-text", `It cannot be resumed with its buffers: it ${why}.`));
    const keep = (given) => {
      address.change(given);
      this.given = { ...this.given, ...given };
    };
    return planning(this.planned, one, { commit: this.given.commit, number: one.commit }, this.given, keep, signal);
  }

  async tails(signal) {
    const newest = this.found.filter((one) => one.run === this.picked.run).at(-1);
    if (newest !== this.picked) return;
    const found = await ask("tails", { run: this.picked.run }, signal);
    if (!found) return;
    const rows = found.ranks.map((one) => [
      one.rank,
      one.objects,
      one.steps,
      one.episodes,
      format.size(one.bytes),
      one.why,
    ]);
    const columns = {
      rank: "name",
      objects: "number",
      steps: "number",
      episodes: "number",
      bytes: "number",
      ends: "text",
    };
    fill(this.tailed, el("h3", "Journal beyond it"), table(columns, rows));
  }
}

function _when(one) {
  return String(one.created_at).slice(0, 19);
}

function _resumed(one, commit, signal) {
  const { resumed } = one;
  const from = resumed.name ? `${cut(resumed.name, 40)} of ${cut(resumed.run, 40)}` : `commit ${resumed.commit}`;
  const ranks = resumed.world_size ? `: ${resumed.world_size} ranks → ${one.world_size}` : "";
  const told = el("p.resumed", `Its session went on from ${from}${ranks}.`);
  if (!resumed.world_size) return told;
  const picture = el("div", "…");
  const draw = async () => {
    if (!folded.open || picture.dataset.asked) return;
    picture.dataset.asked = "yes";
    const asked = { commit, number: resumed.commit, ranks: one.world_size };
    const found = await ask("plan", asked, signal).catch((error) => ({ error }));
    fill(
      picture,
      found.error?.message ?? flow(found.moved, resumed.world_size, one.world_size) ?? "too many ranks for a picture",
    );
  };
  const folded = el(
    "details.resume-flow",
    { ontoggle: draw },
    el("summary", "Who got what, as the plan deals it out"),
    picture,
  );
  return [told, folded];
}

function _changes(changed, one, written) {
  const way = ({ before, after }) =>
    before === after ? format.count(after) : `${format.count(before)} → ${format.count(after)}`;
  return {
    "episodes that came": changed.added,
    "that left": changed.gone,
    "longer now": changed.longer,
    "shorter now": changed.shorter,
    "live steps": way(changed.steps),
    ranks: way(changed.ranks),
    "newly archived": `${format.counted(one.new.episodes, "episode")}, ${format.counted(one.new.steps, "step")}, ${format.size(written)}`,
  };
}

function _folded(name, value) {
  if (value === null || value === undefined || (typeof value === "object" && !Object.keys(value).length)) return null;
  return el("details", el("summary", name), tree(value, { open: 2 }));
}
