"use strict";

addCard({
  id: "slices",
  title: "Slices",
  heads: ["Path", "Model", "Check", "Long requests are sent", "~Why", "~Text of one call", "~Text in slices", "~Remedy"],
  read(status) {
    const data = status.sliced_models || [];
    const rows = data.slice(0, ROWS_MOST).map((one) => [
      one.path, cut(`${one.model || "none"}${one.has_template_options ? ", with chat_template_kwargs" : ""}`, 80), one.verdict,
      one.whole_reason ? "whole" : `by ${one.continued_by}`, one.why, one.whole_text, one.sliced_text, one.remedy]);
    const parts = Object.values(status.slices || {}).reduce((sum, each) => sum + each, 0);
    const sum = [status.slicing_mode === "off" ? "off" : `${whole.format(parts)} slices answered`,
      known(status.call_s) && `calls take ${span(status.call_s)}`].filter(Boolean).join(", ");
    const more = data.length - rows.length;
    const note = [more > 0 && `And ${more} more on /status.`, status.reserve_problem && `${status.reserve_problem}.`].filter(Boolean).join(" ");
    return { rows, sum, note };
  },
});
QUEUE_ROWS.push((status) => (status.started ? [["Wait for their next slice", count(status.started)]] : []));
