"use strict";

QUEUE_ROWS.push((status) => {
  const data = status.sequences || {};
  const many = [["active", "alive"], ["parked", "not begun"], ["held", "held"], ["aborted", "aborted"]].filter(([name]) => data[name]);
  if (!many.length && !data.waiting) return [];
  return [["Sequences", many.map(([name, word]) => `${count(data[name])} ${word}`).join(", ") || "none", data.held ? "wrong" : ""],
    ["Wait for their turn", count(data.waiting || 0)]];
});
