// ZMTP 3.0 with mechanism NULL over Unix sockets: ZeroMQ's PULL that binds, and PUSH that connects.
//
// https://rfc.zeromq.org/spec/23/ describes all of it; this is what the client wire uses.

import net from "node:net";

const MORE = 1, LONG = 2, COMMAND = 4; // flags of a frame

const GREETING = Buffer.alloc(64);
GREETING.set([0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0]); // signature, version 3.0
GREETING.write("NULL", 12);

// A PULL socket. `onMessage` gets each message as an array of frames, whoever it is from.
export class Inbox {
  // Resolves when it is bound.
  static bind(path, onMessage) {
    return new Promise((resolve, reject) => {
      const connections = new Set();
      const server = net.createServer((socket) => {
        connections.add(socket);
        socket.on("close", () => connections.delete(socket));
        new Connection(socket, "PULL", onMessage);
      });
      server.once("error", reject);
      server.listen(path, () => resolve(new Inbox(server, connections)));
    });
  }

  constructor(server, connections) {
    this.server = server;
    this.connections = connections;
  }

  close() {
    this.server.close();
    for (const socket of this.connections) socket.destroy();
  }
}

// A PUSH socket. What is sent before the connection is there waits for it; what is sent to a peer that has died is lost.
export class Outbox {
  constructor(path) {
    this.connection = new Connection(net.connect(path), "PUSH", () => {});
  }

  send(frames) {
    this.connection.send(frames);
  }

  // What was sent still goes out.
  close() {
    this.connection.end();
  }
}

class Connection {
  constructor(socket, type, onMessage) {
    this.socket = socket;
    this.type = type;
    this.onMessage = onMessage;
    this.received = Buffer.alloc(0);
    this.frames = []; // of the message that is arriving
    this.waiting = []; // messages to be sent when the peer is ready; null afterwards
    this.hasGreeting = false;
    this.isEnding = false;
    socket.on("error", () => {}); // "close" follows; the fleet's `Left` tells who has gone
    socket.on("data", (data) => this.take(data));
    socket.write(GREETING);
  }

  send(frames) {
    if (this.waiting !== null) this.waiting.push(frames);
    else frames.forEach((frame, i) => this.socket.write(framed(i < frames.length - 1 ? MORE : 0, frame)));
  }

  end() {
    this.isEnding = true;
    if (this.waiting === null) this.socket.end();
  }

  take(data) {
    this.received = Buffer.concat([this.received, data]);
    if (!this.hasGreeting) {
      if (this.received.length < GREETING.length) return;
      this.received = this.received.subarray(GREETING.length);
      this.hasGreeting = true;
      this.socket.write(framed(COMMAND, ready(this.type)));
    }
    for (let frame; (frame = this.nextFrame()) !== null; ) this.handle(frame);
  }

  nextFrame() {
    const long = (this.received[0] & LONG) !== 0, head = long ? 9 : 2;
    if (this.received.length < head) return null;
    const size = long ? Number(this.received.readBigUInt64BE(1)) : this.received[1];
    if (this.received.length < head + size) return null;
    const frame = { flags: this.received[0], body: this.received.subarray(head, head + size) };
    this.received = this.received.subarray(head + size);
    return frame;
  }

  handle({ flags, body }) {
    if (flags & COMMAND) {
      // READY; the peer's properties are of no interest
      const messages = this.waiting ?? [];
      this.waiting = null;
      messages.forEach((frames) => this.send(frames));
      if (this.isEnding) this.socket.end();
      return;
    }
    this.frames.push(body);
    if (flags & MORE) return;
    const frames = this.frames;
    this.frames = [];
    this.onMessage(frames);
  }
}

function framed(flags, body) {
  if (body.length < 256) return Buffer.concat([Buffer.of(flags, body.length), body]);
  const head = Buffer.of(flags | LONG, 0, 0, 0, 0, 0, 0, 0, 0);
  head.writeBigUInt64BE(BigInt(body.length), 1);
  return Buffer.concat([head, body]);
}

// The command READY: its name, then the one property that must be there, each text after its length.
function ready(type) {
  const property = Buffer.concat([Buffer.from("\x0bSocket-Type"), Buffer.of(0, 0, 0, type.length), Buffer.from(type)]);
  return Buffer.concat([Buffer.from("\x05READY"), property]);
}
