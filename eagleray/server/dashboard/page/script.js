
"use strict";
(() => {
  const HISTORY_SECONDS = 300;
  const SILENT_MS = 10_000; // the server sends something every second
  const HIDDEN_MS = 30_000; // after that, a hidden page gives its connection back
  const RETRY_MS = [500, 1000, 2000, 4000];
  const BASE = location.pathname.replace(/\/+$/, "");
  const KEY_ITEM = `eagleray-key ${BASE}`;
  const byId = (id) => document.getElementById(id);

  // Numbers as they are shown.

  const dash = "–";
  const whole = (n) => n.toLocaleString("en");
  const rate = (n) => (n === null ? dash : n < 10 ? n.toFixed(1) : whole(Math.round(n)));
  const percent = (part) => (part === null ? dash : `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`);
  const seconds = (s) => (s === null ? dash : s < 1 ? `${(1000 * s).toFixed(s < 0.01 ? 1 : 0)} ms` : `${s.toFixed(2)} s`);
  const ago = (s) => (s < 100 ? `${Math.max(0, Math.round(s))} s` : s < 6000 ? `${Math.round(s / 60)} min`
    : s < 172_800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86_400)} d`);
  const plural = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;

  // Elements change only where their content does, so that what a reader has selected or focused stays.

  const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  const setClass = (node, name) => { if (node.className !== name) node.className = name; };
  const make = (id) => byId(id).content.firstElementChild.cloneNode(true);

  function fill(parent, items, { key, create, update }) {
    const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
    items.forEach((item, index) => {
      const name = String(key(item));
      let node = old.get(name);
      if (node === undefined) {
        node = create(item);
        node.dataset.key = name;
      }
      old.delete(name);
      update(node, item);
      if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
    });
    old.forEach((node) => node.remove());
  }

  function fillRows(body, rows) {
    fill(body, rows, {
      key: (cells) => cells[0],
      create: (cells) => {
        const row = document.createElement("tr");
        cells.forEach(() => row.append(document.createElement("td")));
        return row;
      },
      update: (row, cells) => cells.forEach((cell, index) => setText(row.children[index], cell)),
    });
  }

  // Tiles: each with the curve of the last minutes. A point of the history has the values of all tiles.

  const serving = (state) => state.engines.filter((engine) => engine.state === "serving").length;
  const TILES = [
    { name: "Tokens/s generated", read: ({ traffic: t }) => t.generation_tokens_per_second, show: rate, note: ({ traffic: t }) => `${rate(t.prompt_tokens_per_second)} in prompts` },
    { name: "Requests in flight", read: ({ traffic: t }) => t.num_in_flight, show: whole, note: ({ traffic: t }) => `${whole(t.num_running)} running, ${whole(t.num_waiting)} waiting` },
    { name: "Completions/s", read: ({ traffic: t }) => t.requests_per_second, show: rate, note: () => "in the last seconds" },
    { name: "Time to first token, p50", read: ({ traffic: t }) => t.time_to_first_token.p50, show: seconds, note: ({ traffic: t }) => `p95 ${seconds(t.time_to_first_token.p95)}` },
    { name: "Time per output token, mean", read: ({ traffic: t }) => t.time_per_output_token.mean, show: seconds, note: ({ traffic: t }) => `p95 ${seconds(t.time_per_output_token.p95)}` },
    { name: "KV cache in use", read: ({ traffic: t }) => t.cache_usage, show: percent, note: () => "of all engines", top: 1 },
    { name: "Prefix cache hits", read: ({ traffic: t }) => t.cache_hits, show: percent, note: () => "of a minute's prompt tokens", top: 1 },
    { name: "Engines that serve", read: serving, show: whole, note: ({ engines }) => `of ${whole(engines.length)}` },
  ];
  const points = [];

  function remember(state) {
    // Such points are there if this state was sent early, because a member joined or left, or if a clock was set back.
    while (points.at(-1)?.time > state.time - 0.7) points.pop();
    points.push({ time: state.time, values: TILES.map((tile) => tile.read(state)) });
    while (points[0].time < state.time - HISTORY_SECONDS || points.length > HISTORY_SECONDS + 10) points.shift();
  }

  function curve(index, now, top) {
    const span = Math.max(60, now - points[0].time);
    const known = points.filter(({ values }) => values[index] !== null);
    const most = top ?? Math.max(1e-9, ...known.map(({ values }) => values[index]));
    let line = "";
    let area = "";
    let before = null;
    for (const { time, values } of points) {
      const value = values[index];
      const x = (300 * (1 - (now - time) / span)).toFixed(1);
      if (value === null || (before !== null && time - before.time > 3)) {
        if (before !== null) area += `L${before.x} 40Z`;
        before = null;
      }
      if (value !== null) {
        const y = (38 - (36 * Math.min(value, most)) / most).toFixed(1);
        line += `${before === null ? "M" : "L"}${x} ${y}`;
        area += before === null ? `M${x} 40L${x} ${y}` : `L${x} ${y}`;
        before = { x, time };
      }
    }
    if (before !== null) area += `L${before.x} 40Z`;
    return { line, area, known: known.map(({ values }) => values[index]) };
  }

  function showTiles(state) {
    fill(byId("tiles"), TILES.map((tile, index) => ({ ...tile, index })), {
      key: (tile) => tile.name,
      create: (tile) => {
        const node = make("tile");
        setText(node.querySelector("h3"), tile.name);
        return node;
      },
      update: (node, tile) => {
        setText(node.querySelector("b"), tile.show(tile.read(state)));
        setText(node.querySelector(".note"), tile.note(state));
        const { line, area, known } = curve(tile.index, state.time, tile.top);
        node.querySelector(".line").setAttribute("d", line);
        node.querySelector(".area").setAttribute("d", area);
        const range = known.length ? `from ${tile.show(Math.min(...known))} to ${tile.show(Math.max(...known))}` : "no values";
        node.querySelector("svg").setAttribute("aria-label", `${tile.name} in the last minutes: ${range}`);
      },
    });
  }

  // Members.

  const STATES = { serving: "✓ serving", starting: "… starting", restarting: "✕ restarting", gone: "✕ gone" };

  function showEngines(state) {
    fill(byId("engines"), state.engines, {
      key: (engine) => engine.rank,
      create: () => make("engine"),
      update: (node, engine) => {
        const part = (name) => node.querySelector(name);
        const since = engine.since === null ? "" : ` ${ago(state.time - engine.since)}`;
        setClass(node, engine.state);
        setText(part(".name"), engine.label);
        setText(part(".pill"), STATES[engine.state] + since);
        setClass(part(".pill"), `pill ${engine.state}`);
        const places = [engine.host, engine.pid && `process ${engine.pid}`, engine.restarts && plural(engine.restarts, "restart")];
        setText(part(".where"), places.filter(Boolean).join(" · "));
        setText(part(".running"), whole(engine.num_running));
        setText(part(".waiting"), whole(engine.num_waiting));
        setText(part(".out"), rate(engine.generation_tokens_per_second));
        setText(part(".in"), rate(engine.prompt_tokens_per_second));
        part("meter").value = engine.cache_usage ?? 0;
        setText(part(".percent"), percent(engine.cache_usage));
        setText(part(".cause"), engine.cause ?? "");
        fill(part(".workers"), engine.workers, {
          key: (worker) => worker.label,
          create: () => document.createElement("li"),
          update: (item, worker) => {
            const place = worker.host === engine.host ? "" : ` ${worker.host}`;
            setText(item, `${worker.label}${place}${worker.pid ? ` ${worker.pid}` : ` ${worker.state}`}`);
            setClass(item, worker.state);
          },
        });
      },
    });
  }

  function showEvents(state) {
    const list = byId("events");
    const isFirst = list.children.length === 0;
    fill(list, state.events, {
      key: (event) => `${event.time} ${event.member} ${event.kind}`,
      create: (event) => {
        const node = make("event");
        node.className = isFirst ? event.kind : `${event.kind} fresh`;
        node.querySelector("time").dateTime = new Date(1000 * event.time).toISOString();
        node.querySelector("time").title = new Date(1000 * event.time).toLocaleString();
        setText(node.querySelector(".mark"), { started: "·", left: "·", lost: "✕", recovered: "✓" }[event.kind]);
        setText(node.querySelector("b"), event.member);
        const sequel = event.returns ? "a replacement starts" : "no replacement follows";
        setText(node.querySelector(".what"), {
          started: "has started",
          left: `left: ${event.cause}; ${sequel}`,
          lost: `exited: ${event.cause}; ${sequel}`,
          recovered: `serves again, ${seconds(event.downtime)} after the exit`,
        }[event.kind]);
        return node;
      },
      update: (node, event) => setText(node.querySelector("time"), `${ago(state.time - event.time)} ago`),
    });
  }

  // Experts: one pixel for each, enlarged by the browser.

  let experts = null;
  let expertsInstance = null; // name of the instance that `experts` are of
  let cell = null;

  function color(name) {
    const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  }

  function drawHeat() {
    if (experts === null) return;
    const { load } = experts;
    const [layers, width] = [load.length, load[0].length];
    const canvas = byId("heat");
    canvas.width = width;
    canvas.height = layers;
    canvas.style.height = `${layers * Math.max(5, Math.min(22, 420 / layers))}px`;
    const [cold, even, hot] = ["--cold", "--even", "--hot"].map(color);
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, layers);
    load.flat().forEach((percentage, index) => {
      const heat = Math.max(-1, Math.min(1, Math.log2(Math.max(percentage, 1) / 100) / 2));
      const end = heat < 0 ? cold : hot;
      for (let channel = 0; channel < 3; channel += 1) {
        image.data[4 * index + channel] = even[channel] + (end[channel] - even[channel]) * Math.abs(heat);
      }
      image.data[4 * index + 3] = 255;
    });
    context.putImageData(image, 0, 0);
    setText(byId("heat-axis"), `Down: ${plural(layers, "layer")} with experts. Across: ${plural(width, "expert")}.`);
    showCell();
  }

  function showCell() {
    const cursor = byId("heat-cursor");
    cursor.hidden = cell === null;
    if (cell === null) return;
    const { load } = experts;
    const [layers, width] = [load.length, load[0].length];
    cell = { layer: Math.min(cell.layer, layers - 1), expert: Math.min(cell.expert, width - 1) };
    cursor.style.left = `${(100 * cell.expert) / width}%`;
    cursor.style.top = `${(100 * cell.layer) / layers}%`;
    cursor.style.width = `${100 / width}%`;
    cursor.style.height = `${100 / layers}%`;
    setText(byId("heat-cell"), `Layer ${cell.layer}, expert ${cell.expert}: ${load[cell.layer][cell.expert]} % of the layer's mean`);
  }

  function showLayers() {
    if (!byId("layers").open || experts === null) return;
    fillRows(byId("layer-rows"), experts.load.map((load, layer) => {
      const [most, fewest] = [Math.max(...load), Math.min(...load)];
      const name = (value) => `expert ${load.indexOf(value)}, ${value} %`;
      return [String(layer), experts.balance[layer].toFixed(2), name(most), name(fewest)];
    }));
  }

  function showExperts(state) {
    if (state.instance !== expertsInstance) experts = null;
    expertsInstance = state.instance;
    if (state.experts !== null) experts = state.experts;
    byId("experts").hidden = experts === null;
    if (state.experts === null) return; // there are none, or nothing has changed
    drawHeat();
    showLayers();
  }

  function selectCell(event) {
    const box = byId("heat").getBoundingClientRect();
    const at = (position, size, count) => Math.max(0, Math.min(count - 1, Math.floor((count * position) / size)));
    cell = {
      layer: at(event.clientY - box.top, box.height, experts.load.length),
      expert: at(event.clientX - box.left, box.width, experts.load[0].length),
    };
    showCell();
  }

  byId("heat-box").addEventListener("pointermove", selectCell);
  byId("heat-box").addEventListener("pointerdown", selectCell);
  byId("heat-box").addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const { layer, expert } = cell ?? { layer: -step[0], expert: -step[1] };
    cell = { layer: Math.max(0, layer + step[0]), expert: Math.max(0, expert + step[1]) };
    showCell();
  });
  byId("layers").addEventListener("toggle", showLayers);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawHeat);

  // All of it.

  function show(state) {
    remember(state);
    const numServing = serving(state);
    const isWhole = numServing === state.engines.length;
    document.title = `${isWhole ? "" : `${numServing} of ${state.engines.length} engines · `}eagleray ${state.model}`;
    setText(byId("model"), state.model);
    setText(byId("instance"), [
      state.cause === null ? state.state : `${state.state}: ${state.cause}`,
      `${numServing} of ${plural(state.engines.length, "engine")}`,
      `weights ${state.weight_version}`,
      `instance ${state.instance}`,
      `version ${state.version}`,
    ].join(" · "));
    showTiles(state);
    showEngines(state);
    fillRows(byId("nodes"), state.nodes.map((node) => [
      node.host, node.engines.join(", ") || dash, whole(node.num_workers), whole(node.num_away),
    ]));
    fillRows(byId("servers"), state.api_servers.map((server) => [
      server.label, STATES[server.state], server.pid === null ? dash : String(server.pid), whole(server.num_in_flight),
    ]));
    showEvents(state);
    showExperts(state);
    byId("state").hidden = false;
  }

  // The key, which a reload of the page keeps unless the browser refuses to store anything.

  const storage = (() => { try { return sessionStorage; } catch { return null; } })();
  let key = storage?.getItem(KEY_ITEM) ?? null;
  const asHeader = (text) => String.fromCharCode(...new TextEncoder().encode(text)); // headers are bytes

  function setKey(text) {
    key = text;
    if (text === null) storage?.removeItem(KEY_ITEM);
    else storage?.setItem(KEY_ITEM, text);
  }

  // The connection. It is opened again whenever it ends; the key is asked for when the server refuses without one.

  let connection = null; // an AbortController; null while the page is hidden and has no connection
  let openedAt = 0;
  let heardAt = null; // time of the last state
  let numFailures = 0;
  let retry = null;
  let problem = "";

  function showConnection() {
    const node = byId("connection");
    const isLive = problem === "" && heardAt !== null && Date.now() - heardAt < SILENT_MS;
    setClass(node, isLive ? "live" : problem === "" ? "" : "lost");
    const since = heardAt === null ? "" : `; last update ${ago((Date.now() - heardAt) / 1000)} ago`;
    setText(node, isLive ? "live" : `${problem || "connecting"}${since}`);
    document.body.classList.toggle("stale", !isLive);
  }

  function askForKey(message) {
    byId("key-form").hidden = false;
    setText(byId("key-error"), message);
    byId("key").focus();
    problem = "waiting for the API key";
    showConnection();
  }

  async function* events(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  }

  async function refusal(response) {
    const body = await response.json().catch(() => null);
    return body?.error?.message ?? `the server answered ${response.status}`;
  }

  async function connect() {
    clearTimeout(retry);
    connection?.abort();
    const mine = (connection = new AbortController());
    openedAt = Date.now();
    let reason = "the connection was lost";
    let isStopping = true;
    try {
      const headers = { Accept: "text/event-stream", ...(key === null ? {} : { Authorization: `Bearer ${asHeader(key)}` }) };
      const response = await fetch(`${BASE}/state`, { headers, cache: "no-store", signal: mine.signal });
      if (response.status === 401) {
        const message = key === null ? "" : "The server does not take this key.";
        setKey(null);
        askForKey(message);
        return;
      }
      if (response.ok) {
        for await (const state of events(response.body)) {
          if (state.error !== undefined) throw new Error(state.error.message);
          [heardAt, numFailures, problem] = [Date.now(), 0, ""];
          showConnection();
          show(state);
          isStopping = state.state === "stopping";
        }
        if (connection === mine && !isStopping) {
          retry = setTimeout(connect, RETRY_MS[0]); // streams are ended from time to time
          return;
        }
        reason = "the server stopped";
      } else {
        reason = await refusal(response);
      }
    } catch (error) {
      if (connection !== mine) return; // another one has taken its place
      if (!(error instanceof TypeError) && error.name !== "AbortError") reason = error.message;
      else if (heardAt === null) reason = "the server does not answer";
    }
    if (connection !== mine) return;
    if (document.hidden) {
      connection = null; // opened when the page is shown
      return;
    }
    problem = `${reason}; trying again`;
    showConnection();
    retry = setTimeout(connect, RETRY_MS[Math.min(numFailures, RETRY_MS.length - 1)]);
    numFailures += 1;
  }

  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(byId("key").value.trim());
    byId("key").value = "";
    byId("key-form").hidden = true;
    problem = "";
    connect();
  });

  let hiding = null;

  function onVisibilityChange() {
    clearTimeout(hiding);
    if (document.hidden) {
      hiding = setTimeout(() => {
        clearTimeout(retry);
        connection?.abort();
        connection = null;
      }, HIDDEN_MS);
    } else if ((connection === null || problem !== "") && byId("key-form").hidden) {
      connect();
    }
    showConnection();
  }

  document.addEventListener("visibilitychange", onVisibilityChange);

  setInterval(() => {
    if (Date.now() - Math.max(openedAt, heardAt ?? 0) > SILENT_MS) connection?.abort(); // no effect if it has ended
    showConnection();
  }, 1000);

  connect();
  onVisibilityChange();
})();
