// Submit requests to a pool's queue and print their results, by the queue contract alone.
//
//     npm ci && node submit.js 'batch:{qwen}:requests' 600 < requests.jsonl
//
// Each line of standard input is the body of a request, which is to be answered within 600 seconds. Each result is
// printed as it comes: one line of JSON, with the request's id. Ctrl-C cancels what is pending. REDIS_URL says where
// Redis is. Exit code 0: all were answered with a status below 400; 1: some were not; 2: nothing was submitted.

import { randomBytes } from "node:crypto";
import { text } from "node:stream/consumers";
import { setTimeout as sleep } from "node:timers/promises";
import { createClient } from "redis";

const GRACE_S = 30; // a dispatcher answers what is past its deadline within seconds; without one, nobody does
const ONE_CALL = 500; // requests
const now = () => Math.floor(Date.now() / 1000);

// Submits to one queue, and awaits the results in a list of its own.
class Producer {
  constructor(redis, waiting, queue) {
    this.redis = redis;
    this.waiting = waiting; // a connection of its own: a pop that waits holds up all behind it
    this.queue = queue;
    this.prefix = queue.includes("{") ? queue : `{${queue}}`;
    this.run = randomBytes(8).toString("hex");
    this.results = `batch-results:{${this.run}}`;
    this.pending = new Map(); // id -> token
    this.deadline = 0;
    this.count = 0;
    this.made = 0n;
  }

  async submit(bodies, withinS) {
    this.deadline = now() + withinS;
    for (let start = 0; start < bodies.length; start += ONE_CALL) {
      const some = bodies.slice(start, start + ONE_CALL);
      await this.redis.zAdd(this.queue, some.map((body) => ({ score: this.deadline, value: this.member(body) })));
      // Only to be quick: without it a dispatcher looks by itself, so that a Redis that goes away now does no harm.
      await this.redis.publish(`${this.prefix}:wake`, "work").catch(() => {});
    }
  }

  // `internal` stands first and the token first in it: requests of one deadline leave in this order. The body is put
  // in as it is (JSON.parse would round its large numbers), so it reaches the model server byte for byte.
  member(body) {
    const id = `${this.run}-${++this.count}`;
    const token = this.token();
    this.pending.set(id, token);
    const internal = JSON.stringify({ request_token: token, result_queue_name: this.results });
    const head = `"id":${JSON.stringify(id)},"created":${now()},"deadline":${this.deadline}`;
    return `{"internal":${internal},"request_kind":"redis","data":{${head},"payload":${body}}}`;
  }

  // A time that only grows, for the order, and 128 random bits that nobody can guess.
  token() {
    const time = BigInt(Date.now()) * 1_000_000n;
    this.made = time > this.made ? time : this.made + 1n;
    return this.made.toString(16).padStart(16, "0") + randomBytes(16).toString("hex");
  }

  // The next result of a request of ours; null: none came within a second.
  async nextResult() {
    const popped = await this.waiting.brPop(this.results, 1);
    if (popped === null) return null;
    const result = JSON.parse(popped.element);
    if (!this.pending.has(result.id) || this.pending.get(result.id) !== result.request_token) {
      return null; // whoever knows our list may write to it, but not with our token
    }
    this.pending.delete(result.id);
    return result;
  }

  // Ask for all that is pending to be cancelled. Each still gets a result: CANCELLED, or what came before.
  async cancel() {
    const EX = Math.max(1, this.deadline - now());
    const calls = this.redis.multi();
    for (const [id, token] of this.pending) calls.set(`${this.prefix}:cancel:${id}:${token}`, token, { EX });
    await calls.publish(`${this.prefix}:wake`, "cancel").execAsPipeline();
  }
}

async function main(queue, withinS) {
  const bodies = (await text(process.stdin)).split("\n").map((line) => line.trim()).filter(Boolean);
  const bad = bodies.findIndex((body) => !isObject(body));
  if (bad >= 0) {
    console.error(`line ${bad + 1} is no JSON object; nothing was submitted`);
    return 2;
  }
  const url = process.env.REDIS_URL ?? "redis://127.0.0.1:6379";
  const redis = createClient({ url, disableOfflineQueue: true }); // no call waits for Redis to come back
  const waiting = redis.duplicate();
  for (const client of [redis, waiting]) {
    client.on("error", (error) => console.error(`Redis is away: ${error.message}`));
    await client.connect();
  }
  const producer = new Producer(redis, waiting, queue);
  let askedToEnd = false;
  for (const signal of ["SIGINT", "SIGTERM"]) process.once(signal, () => (askedToEnd = true)); // a second ends it
  await producer.submit(bodies, withinS);
  let failed = 0;
  let until = producer.deadline + GRACE_S;
  let cancelled = false;
  while (producer.pending.size > 0 && now() < until) {
    let result;
    try {
      if (askedToEnd && !cancelled) {
        await producer.cancel();
        cancelled = true;
        until = Math.min(until, now() + GRACE_S);
      }
      result = await producer.nextResult();
    } catch (error) {
      console.error(`Redis is away: ${error.message}`); // the client reconnects by itself
      await sleep(1000);
      continue;
    }
    if (result !== null) {
      console.log(JSON.stringify(result));
      if (result.error_code !== undefined || !(result.status_code < 400)) failed += 1;
    }
  }
  for (const id of producer.pending.keys()) {
    console.error(`${id}: no result; does a dispatcher work on ${queue}?`);
  }
  await redis.del(producer.results);
  redis.destroy();
  waiting.destroy();
  return failed > 0 || producer.pending.size > 0 ? 1 : 0;
}

function isObject(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}

const [queue, withinS] = process.argv.slice(2);
if (process.argv.length !== 4 || !(Number(withinS) > 0)) {
  console.error("usage: node submit.js QUEUE SECONDS < requests.jsonl");
  process.exitCode = 2;
} else {
  process.exitCode = await main(queue, Math.ceil(Number(withinS)));
}
