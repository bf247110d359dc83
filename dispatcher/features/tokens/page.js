"use strict";

addCard({
  id: "tokens",
  title: "KV memory",
  heads: ["Model", "Error of the estimated prompts"],
  read(status) {
    const rows = (status.token_estimates || []).slice(0, ROWS_MOST).map((one) => [
      cut(one.model || "none", 80), `${Math.round(one.error * 100)} %`]);
    const sum = known(status.kv_capacity_tokens)
      ? `${whole.format(status.kv_used_tokens)} of ${whole.format(status.kv_capacity_tokens)} tokens in use, `
        + `room for ${whole.format(Math.max(0, status.kv_room_tokens))} more of batch requests`
      : "tokens are not counted";
    return { rows, sum, note: "" };
  },
});
