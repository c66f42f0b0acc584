// msgpack, as far as the client wire needs it: nil, booleans, numbers, texts, bytes, arrays and maps.
//
// Maps are objects here. Whole numbers are written as integers, all others as 64-bit floats. Integers beyond 2^53 are
// BigInts, in both directions.

const utf8 = { encode: (text) => Buffer.from(text, "utf8"), decode: (bytes) => bytes.toString("utf8") };

export function encode(value) {
  const parts = [];
  write(value, parts);
  return Buffer.concat(parts);
}

export function decode(bytes) {
  const reader = new Reader(bytes);
  const value = reader.read();
  if (reader.at !== bytes.length) throw new Error(`${bytes.length - reader.at} bytes follow the message`);
  return value;
}

function write(value, parts) {
  if (value === null || value === undefined) parts.push(Buffer.of(0xc0));
  else if (typeof value === "boolean") parts.push(Buffer.of(value ? 0xc3 : 0xc2));
  else if (typeof value === "bigint") parts.push(integer(value));
  else if (Number.isSafeInteger(value)) parts.push(integer(BigInt(value)));
  else if (typeof value === "number") parts.push(fixed(0xcb, 8, (buffer) => buffer.writeDoubleBE(value, 1)));
  else if (typeof value === "string") {
    const text = utf8.encode(value);
    parts.push(text.length < 32 ? Buffer.of(0xa0 | text.length) : sized([0xd9, 0xda, 0xdb], text.length), text);
  } else if (value instanceof Uint8Array) {
    parts.push(sized([0xc4, 0xc5, 0xc6], value.length), Buffer.from(value));
  } else if (Array.isArray(value)) {
    parts.push(value.length < 16 ? Buffer.of(0x90 | value.length) : sized([null, 0xdc, 0xdd], value.length));
    for (const item of value) write(item, parts);
  } else {
    const entries = Object.entries(value);
    parts.push(entries.length < 16 ? Buffer.of(0x80 | entries.length) : sized([null, 0xde, 0xdf], entries.length));
    for (const [key, item] of entries) {
      write(key, parts);
      write(item, parts);
    }
  }
}

function integer(value) {
  if (value >= 0n && value < 128n) return Buffer.of(Number(value));
  if (value < 0n && value >= -32n) return Buffer.of(256 + Number(value));
  if (value < 0n) return fixed(0xd3, 8, (buffer) => buffer.writeBigInt64BE(value, 1));
  return fixed(0xcf, 8, (buffer) => buffer.writeBigUInt64BE(value, 1));
}

function fixed(code, size, fill) {
  const buffer = Buffer.alloc(1 + size, code);
  fill(buffer);
  return buffer;
}

// The head of something with a length of 8, 16 or 32 bits; `codes` are the codes of the three.
function sized([short, middle, long], length) {
  if (short !== null && length < 2 ** 8) return Buffer.of(short, length);
  if (length < 2 ** 16) return fixed(middle, 2, (buffer) => buffer.writeUInt16BE(length, 1));
  return fixed(long, 4, (buffer) => buffer.writeUInt32BE(length, 1));
}

class Reader {
  constructor(bytes) {
    this.bytes = Buffer.from(bytes);
    this.at = 0;
  }

  read() {
    const code = this.uint(1);
    if (code < 0x80) return code;
    if (code < 0x90) return this.map(code & 0x0f);
    if (code < 0xa0) return this.array(code & 0x0f);
    if (code < 0xc0) return utf8.decode(this.take(code & 0x1f));
    if (code >= 0xe0) return code - 256;
    switch (code) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return this.take(this.uint(1 << (code - 0xc4)));
      case 0xca: return this.take(4).readFloatBE();
      case 0xcb: return this.take(8).readDoubleBE();
      case 0xcc: case 0xcd: case 0xce: return this.uint(1 << (code - 0xcc));
      case 0xcf: return narrow(this.take(8).readBigUInt64BE());
      case 0xd0: return this.take(1).readInt8();
      case 0xd1: return this.take(2).readInt16BE();
      case 0xd2: return this.take(4).readInt32BE();
      case 0xd3: return narrow(this.take(8).readBigInt64BE());
      case 0xd9: case 0xda: case 0xdb: return utf8.decode(this.take(this.uint(1 << (code - 0xd9))));
      case 0xdc: case 0xdd: return this.array(this.uint(2 << (code - 0xdc)));
      case 0xde: case 0xdf: return this.map(this.uint(2 << (code - 0xde)));
      default: throw new Error(`0x${code.toString(16)} is not used on this wire`);
    }
  }

  take(size) {
    if (this.at + size > this.bytes.length) throw new Error("the message is cut off");
    this.at += size;
    return this.bytes.subarray(this.at - size, this.at);
  }

  uint(size) {
    return this.take(size).readUIntBE(0, size);
  }

  array(length) {
    return Array.from({ length }, () => this.read());
  }

  map(length) {
    const value = {};
    for (let i = 0; i < length; i++) {
      const key = this.read(); // the key comes first: an assignment would evaluate in another order
      value[key] = this.read();
    }
    return value;
  }
}

function narrow(value) {
  return value >= Number.MIN_SAFE_INTEGER && value <= Number.MAX_SAFE_INTEGER ? Number(value) : value;
}
