/** @file What can be set for a conversation: the fields, their bounds as the server has them, and what they mean. */

const MAX_SCHEMA_BYTES = 131_072;
/** Tools travel with every turn, whose message has a bound of its own. */
const MAX_TOOLS_CHARS = 262_144;
const MAX_TOOLS = 128;
const MAX_DESCRIPTION_CHARS = 65_536;
const MAX_STOPS = 16;
const MAX_STOP_CHARS = 256;

/**
 * `kind`: what a value is; `min`, `max` and `above` (more than) bound numbers, `max` the characters of
 * a text; `unset` says what no value means. `group`: '' is always in sight.
 * @typedef {object} Field
 * @property {string} name
 * @property {'' | 'sampling' | 'tools' | 'form' | 'leaving'} group
 * @property {'text' | 'number' | 'integer' | 'choice' | 'stops' | 'tools' | 'schema'} kind
 * @property {string} label
 * @property {string} help
 */

/** @type {Field[]} */
export const FIELDS = [
  { name: 'instructions', group: '', kind: 'text', max: 1_048_576, rows: 4, label: 'System prompt', help: 'Who the model should be and what it should mind. It stands before the first message.' },
  { name: 'temperature', group: '', kind: 'number', min: 0, max: 100, step: 0.1, unset: '1', label: 'Temperature', help: '0 always takes the likeliest token; higher values vary more.' },
  { name: 'max_tokens', group: '', kind: 'integer', min: 1, max: 1_048_576, unset: '256', label: 'Longest answer', help: 'In tokens; a token is about three quarters of a word.' },
  { name: 'while_generating', group: '', kind: 'choice', choices: [['', 'Queue it: it waits for the answer'], ['interrupt', 'Interrupt: the answer ends there and is kept']], label: 'A message sent during an answer', help: 'Enter does this; Ctrl+Enter does the other.' },
  { name: 'top_p', group: 'sampling', kind: 'number', above: 0, max: 1, step: 0.05, unset: '1', label: 'Top p', help: 'The likeliest tokens that together have this probability; 1 keeps all.' },
  { name: 'top_k', group: 'sampling', kind: 'integer', min: -1, max: 2 ** 30, unset: '0', label: 'Top k', help: 'As many of the likeliest tokens; 0 keeps all.' },
  { name: 'min_p', group: 'sampling', kind: 'number', min: 0, max: 1, step: 0.01, unset: '0', label: 'Min p', help: 'Tokens with at least this part of the likeliest one’s probability; 0 keeps all.' },
  { name: 'repetition_penalty', group: 'sampling', kind: 'number', above: 0, max: 10, step: 0.05, unset: '1', label: 'Repetition penalty', help: 'On tokens of the conversation and the answer; 1 is none.' },
  { name: 'presence_penalty', group: 'sampling', kind: 'number', min: -2, max: 2, step: 0.1, unset: '0', label: 'Presence penalty', help: 'Once for each token that the answer has.' },
  { name: 'frequency_penalty', group: 'sampling', kind: 'number', min: -2, max: 2, step: 0.1, unset: '0', label: 'Frequency penalty', help: 'Each time that the answer has a token.' },
  { name: 'seed', group: 'sampling', kind: 'integer', min: 0, max: Number.MAX_SAFE_INTEGER, unset: 'default: another for each answer', label: 'Seed', help: 'With one, the same conversation gives the same answer.' },
  { name: 'stop', group: 'sampling', kind: 'stops', rows: 2, label: 'Stop texts', help: `One a line, ${MAX_STOPS} at most; \\n in a line is a line break. The answer ends before the first that it would say.` },
  { name: 'tools', group: 'tools', kind: 'tools', rows: 8, label: 'Functions that the model may call', help: 'A list as Chat Completions takes it. You are asked for what a call returns. Changing it reads the conversation again.' },
  { name: 'tool_choice', group: 'tools', kind: 'choice', choices: [['', 'When it sees fit'], ['required', 'Always'], ['none', 'Never']], label: 'The model calls one', help: '“Never” keeps the functions and takes calls for text.' },
  { name: 'response_format', group: 'form', kind: 'schema', rows: 8, label: 'JSON schema', help: 'Every answer is JSON that fits it, or calls a function.' },
  { name: 'on_disconnect', group: 'leaving', kind: 'choice', choices: [['', 'Finish it: it is here when you come back'], ['cancel', 'Stop it']], label: 'An answer that nobody reads any more', help: 'When this page is closed or has lost its connection.' },
];

const SAMPLING = new Set(FIELDS.filter(({ name, group }) => group === 'sampling' || name === 'temperature' || name === 'max_tokens').map(({ name }) => name));

/** What each preset writes into the fields that it decides. */
export const PRESETS = {
  precise: { label: 'Precise', help: 'Facts and code: no variety.', values: { temperature: '0', top_p: '', top_k: '', min_p: '' } },
  balanced: { label: 'Balanced', help: 'Conversation: some variety.', values: { temperature: '0.7', top_p: '0.95', top_k: '', min_p: '' } },
  free: { label: 'Free', help: 'Ideas and stories: much variety.', values: { temperature: '1.1', top_p: '', top_k: '', min_p: '0.05' } },
};

/** What is inserted to begin with. Any model comes to the end of the schema's values, a small one too. */
export const EXAMPLES = {
  tools: [{
    type: 'function',
    function: {
      name: 'weather',
      description: 'The weather of a city now.',
      parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
    },
  }],
  response_format: {
    type: 'object',
    properties: { answer: { enum: ['yes', 'no', 'unknown'] }, confidence: { enum: ['low', 'medium', 'high'] } },
    required: ['answer', 'confidence'],
    additionalProperties: false,
  },
};

/** @returns {string | null} the preset that these texts are, by their values */
export function presetOf(texts) {
  const isSame = ([name, text]) => (texts[name].trim() === '' ? text === '' : text !== '' && Number(texts[name]) === Number(text));
  return Object.keys(PRESETS).find((name) => Object.entries(PRESETS[name].values).every(isSame)) ?? null;
}

/** @param {object} settings @returns {Record<string, string>} what the fields show */
export function textsOf(settings) {
  return Object.fromEntries(FIELDS.map(({ name, kind }) => {
    const value = SAMPLING.has(name) ? settings.sampling?.[name] : settings[name];
    return [name, value === undefined || value === null ? '' : shown(kind, value)];
  }));
}

/**
 * @param {Record<string, string>} texts
 * @returns {{settings: object, errors: Record<string, string>}} settings in the wire's names, of the
 *   fields that have a value, and what is wrong with the others
 */
export function settingsOf(texts) {
  const settings = {};
  const sampling = {};
  const errors = {};
  for (const field of FIELDS) {
    const text = texts[field.name] ?? '';
    if (text.trim() === '') continue;
    try {
      (SAMPLING.has(field.name) ? sampling : settings)[field.name] = valueOf(field, text);
    } catch (error) {
      errors[field.name] = error.message;
    }
  }
  return { settings: Object.keys(sampling).length ? { ...settings, sampling } : settings, errors };
}

/** @returns {object} what of foreign settings is in order; the rest is left out */
export function soundSettings(settings) {
  const isObject = typeof settings === 'object' && settings !== null;
  return isObject ? settingsOf(textsOf(settings)).settings : {};
}

function shown(kind, value) {
  if (kind === 'schema') return JSON.stringify(value?.json_schema?.schema ?? value, null, 2);
  if (kind === 'tools') return JSON.stringify(value, null, 2);
  if (kind === 'stops') return [value].flat().map((stop) => String(stop).replaceAll('\\', '\\\\').replaceAll('\n', '\\n')).join('\n');
  return String(value);
}

function valueOf(field, text) {
  switch (field.kind) {
    case 'number':
    case 'integer':
      return numberOf(field, Number(text));
    case 'choice':
      if (field.choices.some(([value]) => value === text)) return text;
      throw new Error('There is no such choice.');
    case 'stops':
      return stopsOf(text);
    case 'tools':
      return toolsOf(text);
    case 'schema':
      return formatOf(text);
    default:
      if (numChars(text) <= field.max) return text;
      throw new Error(`At most ${count(field.max)} characters; this has ${count(numChars(text))}.`);
  }
}

function numberOf({ kind, min, max, above }, value) {
  const whole = kind === 'integer' ? 'whole number' : 'number';
  const isNumber = kind === 'integer' ? Number.isInteger(value) : Number.isFinite(value);
  if (isNumber && value <= max && (above === undefined ? value >= min : value > above)) return value;
  throw new Error(above === undefined ? `A ${whole} from ${count(min)} to ${count(max)}.` : `A ${whole} above ${count(above)}, ${count(max)} at most.`);
}

function stopsOf(text) {
  const unescaped = (line) => line.replaceAll(/\\(\\|n)/g, (_, letter) => (letter === 'n' ? '\n' : '\\'));
  const stops = text.split(/\r?\n/).filter((line) => line !== '').map(unescaped);
  if (stops.length > MAX_STOPS) throw new Error(`At most ${MAX_STOPS} texts; these are ${stops.length}.`);
  const long = stops.find((stop) => numChars(stop) > MAX_STOP_CHARS);
  if (long) throw new Error(`At most ${MAX_STOP_CHARS} characters each; one has ${numChars(long)}.`);
  return stops;
}

function toolsOf(text) {
  if (text.length > MAX_TOOLS_CHARS) throw new Error(`At most ${count(MAX_TOOLS_CHARS)} characters.`);
  const tools = [jsonOf(text)].flat().map((tool) => (tool?.function === undefined && tool?.name ? { type: 'function', function: tool } : tool));
  if (tools.length > MAX_TOOLS) throw new Error(`At most ${MAX_TOOLS} functions; these are ${tools.length}.`);
  tools.forEach(checkTool);
  const names = tools.map((tool) => tool.function.name);
  const twice = names.find((name, at) => names.indexOf(name) !== at);
  if (twice) throw new Error(`There are two functions named ${twice}.`);
  return tools;
}

function checkTool(tool, at) {
  const which = `Function ${at + 1}`;
  if (tool?.type !== 'function' || !isObject(tool.function)) throw new Error(`${which} is not {"type": "function", "function": {…}}.`);
  const { name, description, parameters } = tool.function;
  if (typeof name !== 'string' || !/^[\w.-]{1,64}$/.test(name)) throw new Error(`${which} needs a "name" of 1 to 64 letters, digits, and _ . -`);
  if (description !== undefined && (typeof description !== 'string' || numChars(description) > MAX_DESCRIPTION_CHARS)) {
    throw new Error(`The "description" of ${name} is not a text of at most ${count(MAX_DESCRIPTION_CHARS)} characters.`);
  }
  if (parameters !== undefined && !isObject(parameters)) throw new Error(`The "parameters" of ${name} are not a JSON schema, {…}.`);
}

function formatOf(text) {
  const given = jsonOf(text);
  const schema = given?.type === 'json_schema' && isObject(given.json_schema?.schema) ? given.json_schema.schema : given;
  if (!isObject(schema)) throw new Error('A schema is an object, {…}.');
  const size = new TextEncoder().encode(JSON.stringify(schema)).length;
  if (size > MAX_SCHEMA_BYTES) throw new Error(`At most ${count(MAX_SCHEMA_BYTES)} bytes; this has ${count(size)}.`);
  return { type: 'json_schema', json_schema: { name: 'answer', schema } };
}

function jsonOf(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
}

function isObject(value) {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** Characters as the server counts them. */
function numChars(text) {
  let number = 0;
  for (const _ of text) number += 1;
  return number;
}

function count(number) {
  return number.toLocaleString('en-US', { maximumFractionDigits: 3 });
}
