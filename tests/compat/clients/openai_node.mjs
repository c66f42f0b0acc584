// openai (Node.js): calls of the client that a server without tools can answer, its streams, helpers and errors.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const URL = process.env.EAGLERAY_COMPAT_URL;
const MODEL = process.env.EAGLERAY_COMPAT_MODEL;
const MAX_DETAIL = 300;

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const QUESTION = [{ role: "user", content: "What is a list?" }];
const PROMPT = "def main():";

const chatBody = (fields = {}) => ({ model: MODEL, messages: QUESTION, max_tokens: 8, temperature: 0, ...fields });
const chat = (fields, options) => client.chat.completions.create(chatBody(fields), options);
const complete = (fields, options) =>
  client.completions.create({ model: MODEL, prompt: PROMPT, max_tokens: 8, temperature: 0, ...fields }, options);

const checks = [];
const check = (name, run) => checks.push([name, run]);

function assertText(text) {
  assert(typeof text === "string" && text, `a text was expected, not ${JSON.stringify(text)}`);
}

async function joinChat(stream) {
  let text = "";
  for await (const event of stream) text += event.choices[0]?.delta.content ?? "";
  return text;
}

check("models", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert(ids.includes(MODEL), `the model is not in the list ${ids}`);
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

check("chat", async () => {
  const answer = await chat();
  assertText(answer.choices[0].message.content);
  assert(answer.usage.completion_tokens <= 8, "too many tokens");
});

check("chat stream", async () => {
  const text = await joinChat(await chat({ stream: true, stream_options: { include_usage: true } }));
  assert.equal(text, (await chat()).choices[0].message.content);
});

check("chat stream helper", async () => {
  let text = "";
  const stream = client.chat.completions.stream(chatBody()).on("content", (delta) => (text += delta));
  const message = await stream.finalMessage();
  assertText(text);
  assert.equal(message.content, text);
  assert((await stream.totalUsage()).completion_tokens <= 8, "usage");
});

check("chat logprobs", async () => {
  const answer = await chat({ logprobs: true, top_logprobs: 3 });
  const { content } = answer.choices[0].logprobs;
  assert.equal(content.length, answer.usage.completion_tokens);
  assert(content.every((entry) => entry.top_logprobs.length === 3), "not three alternatives each");
});

check("completion", async () => assertText((await complete()).choices[0].text));

check("completion stream", async () => {
  let text = "";
  for await (const event of await complete({ stream: true })) text += event.choices[0].text;
  assert.equal(text, (await complete()).choices[0].text);
});

check("several prompts, token ids, n", async () => {
  const { choices } = await complete({ prompt: ["a", "b"], n: 2, temperature: 1 });
  assert.deepEqual(choices.map((choice) => choice.index), [0, 1, 2, 3]);
  for (const choice of (await complete({ prompt: [[5, 6, 7], [8, 9]] })).choices) assertText(choice.text);
  assert.equal((await chat({ n: 3, temperature: 1 })).choices.length, 3);
});

check("raw response", async () => {
  const { data, response, request_id } = await chat({ no_such_field: 1 }).withResponse();
  assertText(data.id);
  assert.equal(request_id, response.headers.get("x-request-id"));
  assert.equal(response.headers.get("x-eagleray-ignored"), "no_such_field");
});

check("64 parallel streams", async () => {
  const streams = Array.from({ length: 64 }, async () => joinChat(await chat({ stream: true, max_tokens: 16 })));
  assert.equal(new Set(await Promise.all(streams)).size, 1, "greedy streams differ");
});

check("abort", async () => {
  for (let i = 0; i < 20; i++) {
    const stream = await complete({ max_tokens: 500, stream: true, ignore_eos: true });
    for await (const event of stream) break; // which aborts the request
    assert(stream.controller.signal.aborted, "not aborted");
  }
  const controller = new AbortController();
  const answer = complete({ max_tokens: 500, ignore_eos: true }, { signal: controller.signal });
  controller.abort();
  await assert.rejects(answer, OpenAI.APIUserAbortError);
  assertText((await complete()).choices[0].text);
});

check("errors by status", async () => {
  await assert.rejects(complete({ model: "nothing" }), (error) => {
    assert(error instanceof OpenAI.NotFoundError, `${error}`);
    assert(error.message.includes(MODEL), "the served model is not named");
    return true;
  });
  await assert.rejects(complete({ max_tokens: 0 }), (error) => {
    assert(error instanceof OpenAI.BadRequestError, `${error}`);
    assert.equal(error.param, "max_tokens");
    return true;
  });
  await assert.rejects(complete({ prompt: Array(5000).fill(5) }), { code: "context_length_exceeded" });
  await assert.rejects(client.embeddings.create({ model: MODEL, input: "a" }), OpenAI.BadRequestError);
  const nowhere = new OpenAI({ baseURL: "http://127.0.0.1:9/v1", apiKey: "none", maxRetries: 0 });
  await assert.rejects(nowhere.models.list(), OpenAI.APIConnectionError);
  const long = complete({ max_tokens: 500, ignore_eos: true }, { timeout: 1 });
  await assert.rejects(long, OpenAI.APIConnectionTimeoutError);
});

const responsesBody = { model: MODEL, input: "What is a list?", max_output_tokens: 16, temperature: 0 };

check("responses", async () => {
  const answer = await client.responses.create(responsesBody);
  assertText(answer.output_text);
  assert(answer.usage.output_tokens <= 16, "too many tokens");
  const count = await client.responses.inputTokens.count({ model: MODEL, input: responsesBody.input });
  assert.equal(count.input_tokens, answer.usage.input_tokens);
});

check("responses stream", async () => {
  let text = "";
  const stream = client.responses.stream(responsesBody).on("response.output_text.delta", (event) => {
    text += event.delta;
  });
  assert.equal((await stream.finalResponse()).output_text, text);
});

check("history with tool calls", async () => {
  const call = { id: "c1", type: "function", function: { name: "weather", arguments: '{"city": "Rome"}' } };
  const messages = [
    ...QUESTION,
    { role: "assistant", content: null, tool_calls: [call] },
    { role: "tool", tool_call_id: "c1", content: "sunny" },
  ];
  assertText((await chat({ messages })).choices[0].message.content);
});

check("runTools", async () => {
  let isCalled = false;
  const weather = {
    name: "weather",
    parse: JSON.parse,
    function: () => {
      isCalled = true;
      return "sunny";
    },
    parameters: { type: "object", properties: { city: { enum: ["Rome"] } }, additionalProperties: false },
  };
  const tools = [{ type: "function", function: weather }];
  const body = chatBody({ tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 });
  await client.chat.completions.runTools(body, { maxChatCompletions: 2 }).done();
  assert(isCalled, "the tool was not called");
});

check("response_format json_object", async () => {
  assertText((await chat({ response_format: { type: "json_object" }, max_tokens: 64 })).choices[0].message.content);
});

check("parse", async () => {
  const response_format = zodResponseFormat(z.object({ number: z.boolean() }), "answer");
  const answer = await client.chat.completions.parse(chatBody({ response_format, max_tokens: 200 }));
  assert.equal(typeof answer.choices[0].message.parsed.number, "boolean");
});

for (const [name, run] of checks) {
  let detail = "";
  try {
    await run();
  } catch (error) {
    console.error(error);
    detail = `${error?.constructor?.name}: ${error?.message ?? error}`.split(/\s+/).join(" ").slice(0, MAX_DETAIL);
  }
  console.log(JSON.stringify({ name, ok: detail === "", detail }));
}
