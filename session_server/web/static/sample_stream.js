/** @file What the server tells operators once a second. */

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 15_000;

/**
 * Follows `GET /v1/admin/events`, and comes back when it is lost. It is read with fetch, because an
 * EventSource sends no key. Events: `sample` with `detail`, `lost` with the error in `detail`.
 */
export class SampleStream extends EventTarget {
  #api;
  #abort = null;
  #timer = 0;
  #waitMs = FIRST_WAIT_MS;

  /** @param {import('./api.js').Api} api */
  constructor(api) {
    super();
    this.#api = api;
  }

  get isOpen() {
    return this.#abort !== null;
  }

  /** Listen from now on. */
  start() {
    if (this.#abort) return;
    clearTimeout(this.#timer);
    const abort = new AbortController();
    this.#abort = abort;
    this.#follow(abort.signal).then(
      () => this.#comeBack(abort, new Error('The server ended the stream.')),
      (error) => this.#comeBack(abort, error),
    );
  }

  /** Listen no more; the server makes no samples for a page that does not. */
  stop() {
    clearTimeout(this.#timer);
    this.#abort?.abort();
    this.#abort = null;
  }

  async #follow(signal) {
    const response = await this.#api.open('GET', '/v1/admin/events', { headers: { accept: 'text/event-stream' }, signal });
    for await (const data of events(response.body)) {
      const sample = JSON.parse(data);
      if (sample.error) throw new Error(sample.error.message); // its last words: the key was taken back
      this.#waitMs = FIRST_WAIT_MS;
      this.dispatchEvent(new CustomEvent('sample', { detail: sample }));
    }
  }

  #comeBack(abort, error) {
    if (this.#abort !== abort) return; // it was stopped
    this.#abort = null;
    this.dispatchEvent(new CustomEvent('lost', { detail: error }));
    if (error.status === 401 || error.status === 403) return; // another key has to come first
    this.#timer = setTimeout(() => this.start(), this.#waitMs);
    this.#waitMs = Math.min(LONGEST_WAIT_MS, this.#waitMs * 2);
  }
}

/** The data of each event. @param {ReadableStream<Uint8Array>} body */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split('\n\n');
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split('\n').filter((line) => line.startsWith('data: '));
        if (lines.length) yield lines.map((line) => line.slice(6)).join('\n');
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
