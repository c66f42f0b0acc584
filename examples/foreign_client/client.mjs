// A client of eagleray's engines without eagleray, Python or any package: what docs/wire.md says, in Node.js >= 18.
//
//   node client.mjs ATTACH_FILE [--max-tokens 16] [--temperature 0] [--seed 0] [--lease 10] TOKEN_ID...
//
// attaches, continues the prompt, leaves, and prints {"client", "engines", "token_ids", "finish_reason"} as JSON.
// `engines` are those that had the request: more than one, if one of them died.

import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

import { decode, encode } from "./msgpack.mjs";
import { Inbox, Outbox } from "./zmtp.mjs";

const HEARTBEATS = 4; // in a lease
const ATTACH_SECONDS = 30;
const SUSPECT_DEATHS = 2; // from then on a request is a suspect
const MOST_DEATHS = 3; // that a request is not given up after

export class Client {
  // Resolves when the supervisor has answered.
  static async attach(attachFile, lease) {
    const { supervisor } = JSON.parse(fs.readFileSync(attachFile, "utf8"));
    const client = new Client(lease);
    client.directory = fs.mkdtempSync(path.join(os.tmpdir(), "eagleray-client-")); // mode 0700
    const inboxPath = path.join(client.directory, "inbox");
    client.inbox = await Inbox.bind(inboxPath, ([frame]) => client.handle(decode(frame))); // bind first …
    client.supervisor = connect(supervisor);
    client.tell(client.supervisor, { type: "Register", address: `ipc://${inboxPath}`, lease }); // … then tell
    try {
      await within(ATTACH_SECONDS, client.attached, "no answer from the supervisor");
    } catch (error) {
      client.leave();
      throw error;
    }
    return client;
  }

  constructor(lease) {
    this.lease = lease; // seconds
    this.id = null; // what `Attach` calls us
    this.attached = new Promise((resolve) => (this.onAttach = resolve));
    this.engines = new Map(); // name -> { id, info, outbox }
    this.requests = new Map(); // name on the wire -> request
    this.parked = new Set(); // requests that wait for an engine
    this.serial = 0;
  }

  // Resolves to { engines, token_ids, finish_reason } when the request has ended.
  generate(promptTokenIds, sampling, stopping) {
    return new Promise((resolve, reject) => {
      const request = {
        message: { client: this.id, prompt_token_ids: promptTokenIds, sampling, stopping },
        tokenIds: [],
        engines: [],
        deaths: 0,
        hasBegun: false, // since it was sent the last time
        resolve,
        reject,
      };
      this.send(request);
    });
  }

  // What runs is dropped by the engines; the lease ends by itself.
  leave() {
    clearInterval(this.heart);
    for (const { id, outbox } of this.engines.values()) {
      const running = [...this.requests].filter(([, { engine }]) => engine === name(id)).map(([wireName]) => wireName);
      if (running.length > 0) this.tell(outbox, { type: "Abort", client: this.id, request_ids: running });
      outbox.close();
    }
    this.supervisor.close();
    this.inbox.close();
    fs.rmSync(this.directory, { recursive: true });
  }

  handle(message) {
    switch (message.type) {
      case "Attach":
        this.id = message.member;
        message.members.forEach((member) => this.join(member));
        this.tell(this.supervisor, { type: "ClientStarted", client: this.id });
        this.heart = setInterval(
          () => this.tell(this.supervisor, { type: "Alive", member: this.id }), (this.lease / HEARTBEATS) * 1000,
        );
        return this.onAttach();
      case "Joined":
        return this.join(message);
      case "Left":
        return this.part(message);
      case "Draining":
        return this.drain(message.engine);
      case "Chunks":
        message.chunks.forEach((chunk) => this.deliver(chunk));
        return Object.entries(message.tokens ?? {}).forEach(([request_id, token]) =>
          this.deliver({ request_id, token_ids: [token] }),
        );
      case "Stop": // what runs may finish; what waits for an engine, or would be lost, has no future
        this.reject(this.parked, message.cause || "the instance ends");
        return this.parked.clear();
    }
  }

  join({ member, address, engine }) {
    if (member.type !== "engine") return;
    this.engines.set(name(member), { id: member, info: engine, outbox: connect(address) });
    const waiting = [...this.parked];
    this.parked.clear();
    waiting.forEach((request) => this.send(request));
  }

  // An engine is going to leave: it gets no new requests while there is another one.
  drain(id) {
    const engine = this.engines.get(name(id));
    if (engine !== undefined) engine.drains = true;
    this.reportDrained();
  }

  reportDrained() {
    for (const engine of [...this.engines.values()].filter((engine) => engine.drains && this.load(engine) === 0)) {
      this.tell(this.supervisor, { type: "Drained", client: this.id, engine: engine.id });
    }
  }

  load({ id }) {
    return [...this.requests.values()].filter(({ engine }) => engine === name(id)).length;
  }

  // An engine is gone: its requests go on elsewhere, after the tokens that are here.
  part({ member, cause, returns, is_planned }) {
    if (member.type !== "engine") {
      if (member.index === this.id.index) this.reject(this.requests.values(), `the lease is over: ${cause}`);
      return;
    }
    this.engines.get(name(member))?.outbox.close();
    this.engines.delete(name(member));
    const hit = [...this.requests].filter(([, { engine }]) => engine === name(member));
    for (const [wireName, request] of hit) {
      this.requests.delete(wireName); // late chunks belong to nobody
      if (!is_planned && (request.deaths === 0 || request.hasBegun)) {
        request.deaths = request.hasToken ? 1 : request.deaths + 1;
      }
      if (request.deaths > MOST_DEATHS) request.reject(new Error(`engines died of it, the last one because: ${cause}`));
      else this.send(request);
    }
    if (this.engines.size === 0 && !returns) {
      this.reject(this.parked, `there is no engine any more: ${cause}`);
      this.parked.clear();
    }
  }

  send(request) {
    const engines = [...this.engines.values()];
    if (engines.length === 0) return void this.parked.add(request);
    const open = engines.filter(({ drains }) => !drains);
    const engine = (open.length > 0 ? open : engines).reduce((a, b) => (this.load(b) < this.load(a) ? b : a));
    const wireName = `r${this.serial++}`; // never used again
    Object.assign(request, { engine: name(engine.id), hasBegun: false, hasToken: false });
    request.engines.push(engine.id);
    this.requests.set(wireName, request);
    this.tell(engine.outbox, {
      type: "Generate",
      request_id: wireName,
      ...request.message,
      output_token_ids: request.tokenIds,
      is_suspect: request.deaths >= SUSPECT_DEATHS,
      announce_start: request.deaths > 0,
    });
  }

  deliver(chunk) {
    const request = this.requests.get(chunk.request_id);
    if (request === undefined) return; // it has ended here, or gone elsewhere
    // Fields that have their default are left out by the engine.
    const { token_ids = [], finish_reason = null, error = null } = chunk;
    request.hasBegun = true;
    request.hasToken ||= token_ids.length > 0;
    request.tokenIds.push(...token_ids);
    if (finish_reason === null) return;
    this.requests.delete(chunk.request_id);
    this.reportDrained();
    if (finish_reason === "error") request.reject(new Error(error));
    else request.resolve({ engines: request.engines, token_ids: request.tokenIds, finish_reason });
  }

  reject(requests, why) {
    for (const request of requests) request.reject(new Error(why));
  }

  tell(outbox, message) {
    outbox.send([encode(message)]);
  }
}

function connect(address) {
  if (!address.startsWith("ipc://")) throw new Error(`${address}: this client speaks ipc alone; TCP needs CURVE`);
  return new Outbox(address.slice("ipc://".length));
}

// An engine that was started again is another one.
function name({ rank, incarnation }) {
  return `${rank}.${incarnation}`;
}

async function within(seconds, promise, complaint) {
  let timer;
  const late = new Promise((_, reject) => (timer = setTimeout(() => reject(new Error(complaint)), seconds * 1000)));
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}

if (fs.realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      "max-tokens": { type: "string", default: "16" },
      temperature: { type: "string", default: "0" },
      seed: { type: "string", default: "0" },
      lease: { type: "string", default: "10" },
    },
  });
  const [attachFile, ...tokenIds] = positionals;
  const client = await Client.attach(attachFile, Number(values.lease));
  try {
    const answer = await client.generate(
      tokenIds.map(Number),
      { seed: BigInt(values.seed), temperature: Number(values.temperature) },
      { max_tokens: Number(values["max-tokens"]) },
    );
    console.log(JSON.stringify({ client: client.id, ...answer }));
  } finally {
    client.leave();
  }
}
