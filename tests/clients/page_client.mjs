// `examples/browser.html` in Chromium: a talk, a connection that is lost, and a reload, in the middle
// of an answer.

import assert from 'node:assert';
import { readFile } from 'node:fs/promises';
import { createServer } from 'node:http';

import chromium from '@sparticuz/chromium';
import puppeteer from 'puppeteer-core';

const url = process.argv[2];
const html = await readFile('browser.html');
const pages = createServer((_, response) => {
  response.setHeader('content-type', 'text/html');
  response.end(html);
}).listen(0, '127.0.0.1');
const executablePath = await chromium.executablePath();
const browser = await puppeteer.launch({ args: ['--no-sandbox'], executablePath, headless: 'shell' });
const page = await browser.newPage();
page.setDefaultTimeout(60_000);
const broken = [];
page.on('pageerror', (error) => broken.push(error));

const said = () => page.$$eval('#log p', (all) => all.map((one) => one.textContent));
const until = (words) =>
  page.waitForFunction(
    (words) => document.querySelector('#log p:last-child')?.textContent.includes(words),
    {},
    words,
  );
const atRest = () => page.waitForFunction(() => turn === null && socket.readyState === WebSocket.OPEN);
const ask = async (question) => {
  await page.type('#line', question);
  await page.keyboard.press('Enter');
};

await page.goto(`http://127.0.0.1:${pages.address().port}/?server=${url}`);
await atRest();
await ask('My name is Ada.');
await until('Ada.');
await atRest();
const count = 'Count from 1 to 1000.';
await ask(count);
await until('1 ');
await page.evaluate(() => socket.close());
await page.waitForFunction(() => socket.readyState === WebSocket.OPEN);
const long = (await said()).at(-1).length;
await page.waitForFunction((long) => !turn || answer.textContent.length > long, {}, long);
await page.reload();
await page.waitForFunction(() => log.children.length === 4 && (!turn || answer.textContent.length > 9));
await page.click('#stop');
await atRest();
const [, , asked, counted] = await said();
assert.equal(asked, count);
await page.reload();
await atRest();
await page.waitForFunction(() => log.children.length === 4);
assert.equal((await said())[3], counted, 'what the page has pieced together is what the session has');
await ask('What is my name?');
await until('Your name is Ada.');
await atRest();
assert.deepEqual(broken, []);
console.log((await said()).join('\n'));
console.log(await page.$eval('#state', (state) => state.textContent));
await browser.close();
pages.close();
