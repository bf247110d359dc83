"use strict";

const VERSIONS_MOST = 5, PROBLEMS_MOST = 3;

addCard({
  id: "models",
  title: "Models",
  open: true,
  heads: ["Model", "State", "#Endpoints", "#Waiting", "#For", "~How it is"],
  read(status) {
    const all = status.models || [], rows = [];
    for (const each of all.slice(0, ROWS_MOST)) {
      rows.push([each.name, each.state, `${each.serving} of ${each.endpoints}`, known(each.waiting) ? count(each.waiting) : "unknown", span(each.since_s), each.sentence]);
      const versions = (each.versions || []).filter((one) => one.state !== "gone"), more = versions.length - VERSIONS_MOST;
      for (const one of versions.slice(0, VERSIONS_MOST)) {
        rows.push([{ under: one.name, of: "version" }, one.state, String(one.serving), "", span(one.since_s), version(one, each.labels || {})]);
      }
      if (more > 0) rows.push(["", "", "", "", "", `and ${more} more versions`]);
    }
    const number = status.model_count || all.length, waiting = all.reduce((sum, each) => sum + each.waiting, 0);
    const sum = [number && `${count(number)} known`, waiting && `${plural(waiting, "request waits for its", "requests wait for their")} model`].filter(Boolean).join(", ");
    const problems = status.model_problems || [], unread = problems.length - PROBLEMS_MOST;
    const note = [number > ROWS_MOST && `And ${number - Math.min(ROWS_MOST, all.length)} more models; /status has ${all.length}.`,
      ...problems.slice(0, PROBLEMS_MOST).map((each) => `${cut(each).replace(/\.$/, "")}.`),
      unread > 0 && `And ${plural(unread, "more endpoint", "more endpoints")} cannot be read.`].filter(Boolean).join(" ");
    return { rows, sum, note: rows.length ? note : "" };
  },
});

function version(one, labels) {
  const named = (name) => (labels[name] && labels[name].by ? `${name} (${labels[name].by})` : name);
  return [one.share && `${share(one.share)} of the requests`, known(one.warm) && `warm at ${one.warm} of ${one.serving}`,
    one.labels.length && `labelled ${one.labels.map(named).join(", ")}`, one.drained && `drained ${one.drained_by || ""}`.trim()].filter(Boolean).join("; ");
}
