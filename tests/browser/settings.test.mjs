// Settings: every bound is the server's, texts and settings say the same, and what is wrong is said in words.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import { EXAMPLES, FIELDS, presetOf, PRESETS, settingsOf, soundSettings, textsOf } from '../../session_server/web/static/settings_fields.js';

const protocol = readFileSync(new URL('../../docs/protocol.md', import.meta.url), 'utf8');
const errorOf = (name, text) => settingsOf({ [name]: text }).errors[name];
const valueOf = (name, text) => {
  const { settings, errors } = settingsOf({ [name]: text });
  assert.deepEqual(errors, {});
  return name in settings ? settings[name] : settings.sampling[name];
};

test('numbers are taken at their bounds and not beyond them', () => {
  for (const { name, kind, min, max, above, label } of FIELDS.filter((field) => field.kind === 'number' || field.kind === 'integer')) {
    const step = kind === 'integer' ? 1 : 0.001;
    const low = above === undefined ? min : above + step;
    for (const value of [low, low + step, max - step, max]) assert.equal(valueOf(name, String(value)), value, name);
    for (const value of [low - step, max + (max === Number.MAX_SAFE_INTEGER ? 2 : step), 'x', '1,5', 'NaN', 'Infinity', '1e999']) assert.ok(errorOf(name, String(value)), `${name} ${value}`);
    if (kind === 'integer') assert.match(errorOf(name, '1.5'), /whole number/);
    assert.ok(label);
  }
});

test('the bounds are those that the protocol names', () => {
  for (const { name, min, max, above, kind } of FIELDS.filter((field) => field.kind === 'number' || field.kind === 'integer')) {
    const [, takes] = new RegExp(`^\\| \`${name}\` \\| ([^|]*) \\|`, 'm').exec(protocol);
    const number = (value) => (value === 2 ** 30 ? '2^30' : value.toLocaleString('en-US'));
    const lowest = name === 'max_tokens' ? 0 : min;
    if (name === 'seed') assert.equal(takes, 'integer, 0 to 2^63 - 1');
    else if (above !== undefined) assert.equal(takes, `number, above ${above} to ${number(max)}`);
    else assert.equal(takes, `${kind}, ${number(lowest)} to ${number(max)}`);
  }
});

test('settings become texts and the same settings again', () => {
  const settings = {
    instructions: 'Be brief.\nAlways.', while_generating: 'interrupt', tool_choice: 'required', on_disconnect: 'cancel',
    tools: EXAMPLES.tools, response_format: { type: 'json_schema', json_schema: { name: 'answer', schema: EXAMPLES.response_format } },
    sampling: { temperature: 0, max_tokens: 1, top_p: 0.5, top_k: -1, min_p: 1, repetition_penalty: 0.1, presence_penalty: -2, frequency_penalty: 2, seed: 7, stop: ['\n\n', 'a\\nb', ' end '] },
  };
  assert.deepEqual(settingsOf(textsOf(settings)), { settings, errors: {} });
  assert.deepEqual(soundSettings(settings), settings);
  assert.deepEqual(settingsOf(textsOf({})), { settings: {}, errors: {} });
});

test('the examples are in order, and may be written in other ways', () => {
  assert.deepEqual(valueOf('tools', JSON.stringify(EXAMPLES.tools)), EXAMPLES.tools);
  assert.deepEqual(valueOf('tools', JSON.stringify(EXAMPLES.tools[0].function)), EXAMPLES.tools);
  const { schema } = valueOf('response_format', JSON.stringify(EXAMPLES.response_format)).json_schema;
  assert.deepEqual(schema, EXAMPLES.response_format);
  assert.ok(Object.values(schema.properties).every((values) => values.enum), 'any model comes to an end of it');
  const wrapped = { type: 'json_schema', json_schema: { name: 'x', strict: true, schema } };
  assert.deepEqual(valueOf('response_format', JSON.stringify(wrapped)).json_schema.schema, schema);
});

test('what is wrong with tools and schemas is said', () => {
  const tool = (fields) => JSON.stringify([{ type: 'function', function: fields }]);
  assert.match(errorOf('tools', '[{]'), /^This is not JSON: /);
  assert.match(errorOf('tools', '["x"]'), /Function 1 is not/);
  assert.match(errorOf('tools', 'null'), /Function 1 is not/);
  assert.match(errorOf('tools', tool({ name: 'a b' })), /"name"/);
  assert.match(errorOf('tools', tool({})), /"name"/);
  assert.match(errorOf('tools', tool({ name: 'a', description: 1 })), /"description" of a/);
  assert.match(errorOf('tools', tool({ name: 'a', parameters: [] })), /"parameters" of a/);
  assert.match(errorOf('tools', JSON.stringify([{ name: 'a' }, { name: 'a' }])), /two functions named a/);
  assert.match(errorOf('response_format', '[1]'), /object/);
  assert.match(errorOf('response_format', 'x'), /not JSON/);
});

test('lists and texts are taken at their bounds and not beyond them', () => {
  const tools = (number) => JSON.stringify(Array.from({ length: number }, (_, at) => ({ name: `f${at}` })));
  assert.equal(valueOf('tools', tools(128)).length, 128);
  assert.match(errorOf('tools', tools(129)), /At most 128/);
  assert.equal(valueOf('tools', JSON.stringify({ name: 'a'.repeat(64) })).length, 1);
  assert.ok(errorOf('tools', JSON.stringify({ name: 'a'.repeat(65) })));
  const lines = (number) => Array.from({ length: number }, (_, at) => `s${at}`).join('\n');
  assert.equal(valueOf('stop', lines(16)).length, 16);
  assert.match(errorOf('stop', lines(17)), /At most 16/);
  assert.equal(valueOf('stop', '😀'.repeat(256)).length, 1);
  assert.match(errorOf('stop', '😀'.repeat(257)), /257/);
  const schema = (bytes) => JSON.stringify({ title: 'x'.repeat(bytes - 12) });
  assert.equal(new TextEncoder().encode(schema(131_072)).length, 131_072);
  assert.ok(valueOf('response_format', schema(131_072)));
  assert.match(errorOf('response_format', schema(131_073)), /131,073/);
  assert.equal(valueOf('instructions', 'x'.repeat(1 << 20)).length, 1 << 20);
  assert.match(errorOf('instructions', 'x'.repeat((1 << 20) + 1)), /1,048,576/);
});

test('presets are known by their values', () => {
  const none = textsOf({});
  for (const [name, { values }] of Object.entries(PRESETS)) {
    assert.equal(presetOf({ ...none, ...values }), name);
    assert.deepEqual(settingsOf(values).errors, {});
  }
  assert.equal(presetOf({ ...none, temperature: '0.70', top_p: '.95' }), 'balanced');
  assert.equal(presetOf({ ...none, temperature: '0.71', top_p: '.95' }), null);
  assert.equal(presetOf(none), null);
});

test('of foreign settings only what is in order stays', () => {
  assert.deepEqual(soundSettings({
    instructions: 'ok', sampling: { temperature: 'hot', top_p: 0.5, stop: 'x', logit_bias: { 1: 2 }, __proto__: { seed: 1 } }, tools: '<script>', response_format: [], on_disconnect: 'explode', other: 1,
  }), { instructions: 'ok', sampling: { top_p: 0.5, stop: ['x'], seed: 1 } });
  for (const foreign of [null, undefined, 1, 'x', [], { sampling: 3 }, { sampling: null, tools: 7 }]) assert.deepEqual(soundSettings(foreign), {});
});
