"use strict";

addCard({
  id: "batching",
  title: "Batching",
  heads: ["Path", "Model", "#Items a call", "#Server takes", "#Gain", "#Checked", "~What is merged"],
  read(status) {
    const data = [...status.batching || []].sort((one, other) => !!other.off_reason - !!one.off_reason);
    const rows = data.slice(0, ROWS_MOST).map((each) => [
      each.path, each.model || "none", String(each.size), known(each.server_max_items) ? String(each.server_max_items) : "unknown",
      known(each.gain) ? `${each.gain.toFixed(2)} ×` : "unknown", String(each.checked_calls), each.sentence]);
    const calls = Object.values(status.batching_calls || {}).reduce((sum, each) => sum + each, 0);
    const sum = `${whole.format(status.batching_requests || 0)} requests in ${whole.format(calls)} merged calls, `
      + `${whole.format(status.batching_waiting || 0)} wait to be merged`;
    return { rows, sum, note: data.length > rows.length ? `And ${data.length - rows.length} more on /status.` : "" };
  },
});
