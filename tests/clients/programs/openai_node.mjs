// What the openai client for Node does with a model behind kvlane, as JSON. usage: node openai_node.mjs URL MODULES
import { createRequire } from "node:module";

const { OpenAI } = createRequire(`${process.argv[3]}/`)("openai");
const api = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "system", content: "Be brief." }, { role: "user", content: "Tell me of the sea." }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", parameters } }];

const chat = (fields) => api.chat.completions.create({ model: "sim", messages, max_tokens: 5, ...fields });

async function streamed() {
  let text = "";
  for await (const chunk of await chat({ stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
  return text;
}

async function refused() {
  try {
    await chat({ model: "nope" });
  } catch (error) {
    return { status: error.status, code: error.code };
  }
}

async function leave() {
  for await (const _ of await chat({ max_tokens: 2000, stream: true })) break;
  return true;
}

const called = (await chat({ tools, tool_choice: "required" })).choices[0].message.tool_calls[0].function;
const embeddings = await api.embeddings.create({ model: "sim", input: ["the sea", "the land"] });
const said = {
  chat: (await chat()).choices[0].message.content,
  stream: await streamed(),
  tool: { name: called.name, arguments: JSON.parse(called.arguments) },
  embeddings: embeddings.data.length,
  error: await refused(),
  left: await leave(),
};
console.log(JSON.stringify(said));
