// What KV is kept outside of the pools is shown against what may be.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { Element } from './small_dom.mjs';
import { TierBars } from '../../session_server/web/static/tier_bars.js';

const TIERS = {
  host_bytes: 3 << 20, host_max_bytes: 1 << 30, disk_bytes: 0, disk_max_bytes: 0,
  spilled_tokens: 5000, restored_tokens: 1200, lookups: 0, hits: 0,
};

test('each tier shows what it holds of its limit, and what it was good for', () => {
  const place = new Element('div');
  const bars = new TierBars(place);
  bars.show(TIERS);
  const [host, disk, about] = place.children;
  assert.equal(place.hidden, false);
  assert.equal(host.children[0].textContent, 'KV in host memory 3.0 MiB of 1.0 GiB');
  assert.equal(disk.hidden, true);
  assert.equal(about.textContent, '5,000 tokens copied out of the pools · 1,200 copied back');
  bars.show({ ...TIERS, disk_bytes: 60 << 20, disk_max_bytes: 2 ** 40, lookups: 20, hits: 15 });
  assert.equal(disk.hidden, false);
  assert.equal(disk.children[0].textContent, 'KV on disk 60.0 MiB of 1.0 TiB');
  assert.match(about.textContent, /found for 75 % of 20 cold sessions$/);
});

test('a server without tiers shows none', () => {
  const place = new Element('div');
  new TierBars(place).show({ ...TIERS, host_bytes: 0, host_max_bytes: 0 });
  assert.equal(place.hidden, true);
});
