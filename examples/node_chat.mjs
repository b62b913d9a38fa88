// Hold a conversation with `openai` for Node: over Chat Completions, where every call sends all of
// it, and over a WebSocket of Responses, where the server keeps it.
//
//     npm install openai ws; session-server serve; node examples/node_chat.mjs

import OpenAI from 'openai';
import { ResponsesWS } from 'openai/resources/responses/ws';

const QUESTIONS = ['My name is Ada.', 'What is my name?', 'My city is Oslo.', 'What is my city?'];
const url = process.argv[2] ?? 'http://127.0.0.1:30000';
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.OPENAI_API_KEY ?? 'none' });

const show = (question, answer, cached, total) =>
  console.log(`> ${question}\n${answer}\n  ${cached} of ${total} tokens were cached\n`);

async function chat(options) {
  const messages = [];
  for (const content of QUESTIONS) {
    messages.push({ role: 'user', content });
    const stream = client.chat.completions.stream({
      ...options,
      messages,
      stream_options: { include_usage: true },
    });
    const { choices, usage } = await stream.finalChatCompletion();
    const answer = choices[0].message.content;
    messages.push({ role: 'assistant', content: answer });
    show(content, answer, usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens);
  }
}

async function respond(options) {
  const connection = new ResponsesWS(client);
  let previous_response_id = null;
  for (const input of QUESTIONS) {
    const response = await new Promise((resolve, reject) => {
      connection.once('error', reject);
      connection.once('response.incomplete', () => reject(new Error('the answer was cut off')));
      connection.once('response.completed', ({ response }) => resolve(response));
      connection.send({ type: 'response.create', ...options, input, previous_response_id });
    });
    previous_response_id = response.id;
    const answer = response.output.flatMap((item) => item.content ?? []).map((part) => part.text);
    const usage = response.usage;
    show(input, answer.join(''), usage.input_tokens_details.cached_tokens, usage.input_tokens);
  }
  connection.close();
}

try {
  const [model] = (await client.models.list()).data;
  const options = { model: model.id, temperature: 0 };
  console.log('Chat Completions: every call sends the whole conversation\n');
  await chat(options);
  console.log('Responses over a WebSocket: the server keeps the conversation\n');
  await respond(options);
} catch (error) {
  const unreached = error instanceof OpenAI.APIConnectionError;
  const advice = unreached ? ` Is a server running at ${url}? \`session-server serve\`` : '';
  console.error(error.message + advice);
  process.exit(1);
}
