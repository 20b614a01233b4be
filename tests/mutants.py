"""Which faults of a tired colleague the tests notice: mutants written by hand, each with the tests that must fail.

    python tests/mutants.py             # all; or those whose line has a word: python tests/mutants.py routing jit

Each line of MUTANTS is a module, its text, the text with the fault, and the tests of the module: files, and behind a
colon an expression for `pytest -k`, where the whole file takes long. A mutant lives in a copy of the repository.
Compiled functions run as Python, as in `mutation.py`, which draws its mutants at random. A mutant that is like the
original in all that it does is no entry here.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 300  # for one mutant; an endless loop counts as noticed
# fmt: off
MUTANTS = [
    ("routing", "(ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2))", "(ordered[..., 1:] == ordered[..., :-1]).all(axis=1).any(axis=1)", "routing"),
    ("routing", "np.sort(expert_ids[start : start + BLOCK_TOKENS], axis=2)", "np.sort(expert_ids[start : start + BLOCK_TOKENS], axis=1)", "routing"),
    ("routing", "layers * top_k < MIN_IDS", "layers * top_k <= MIN_IDS", "routing"),
    ("routing", "token_ids_of_pattern[pattern] > 1", "token_ids_of_pattern[pattern] >= 1", "routing"),
    ("routing", "check_left_out(name, self.left_out, self.left_out + self.tokens)", "check_left_out(name, self.left_out, self.tokens)", "routing"),
    ("routing", "self.identical > MIN_IDENTICAL_SHARE * self.tokens", "self.identical >= MIN_IDENTICAL_SHARE * self.tokens", "routing"),
    ("npz", "held = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()", "held = math.prod(shape) * dtype.itemsize, member.file_size", "trace"),
    ("npz", "unpacked > MAX_TRACE_BYTES", "unpacked < 0", "trace"),
    ("npz", "tokens[s + p : s + p + n]", "tokens[s + p : s + n]", "trace"),
    ("npz", 'prompts = [tokens[s : s + p] for s, p in zip(starts[:-1], first, strict=True)]', 'prompts = [tokens[s : s + p] for s, p in zip(starts[1:], first, strict=True)]', "trace"),
    ("npz", "_meta_vocabulary(path) or seen", "seen or _meta_vocabulary(path)", "trace"),
    ("npz", "int(whole_numbers(\"expert_ids\", experts).max()) + 1", "int(whole_numbers(\"expert_ids\", experts).max())", "trace"),
    ("npz", "if not np.array_equal(narrow, ids):", "if narrow.shape != ids.shape:", "trace"),
    ("npz", "arrays.get(\"phase\", np.zeros(len(tokens), np.uint8))", "np.zeros(len(tokens), np.uint8)", "trace"),
    ("jit", "return uncached(function)", "return cached(function)", "jit"),
    ("jit", 'if "no locator available" not in str(error):', 'if "no locator available" in str(error):', "jit"),
    ("jit", 'os.environ[NOTED] = "1"', 'os.environ[NOTED + "_"] = "1"', "jit"),
    ("prompts", "while len(messages) > 1 and messages[-1]", "while len(messages) > 2 and messages[-1]", "dataset"),
    ("prompts", 'if begun_by_user and "user" in roles and roles[0] != "user":', 'if "user" in roles and roles[0] != "user":', "dataset"),
    ("prompts", 'not in ("system", "developer")]', 'not in ("system",)]', "dataset"),
    ("prompts", 'inner.get("parameters", inner.get("input_schema"))', 'inner.get("parameters")', "dataset"),
    ("prompts", 'return {**({"reasoning_effort": effort} if isinstance(effort, str) else {}), **given}', 'return {**given, **({"reasoning_effort": effort} if isinstance(effort, str) else {})}', "dataset"),
    ("prompts", "return type(value) is int  # not a bool", "return isinstance(value, int)", "dataset"),
    ("prompts", 'return "\\n".join(part["text"] for part in content)', 'return "".join(part["text"] for part in content)', "dataset"),
    ("dataset", "10 * count > self.records", "10 * count >= self.records", "dataset"),
    ("dataset", "self.records >= MIN_RECORDS", "self.records > MIN_RECORDS", "dataset"),
    ("dataset", 'line += content.count("\\n", start, end)', 'line += content.count("\\n", start, start)', "dataset"),
    ("dataset", "if isinstance(most, int) and len(ids) > most:", "if isinstance(most, int) and len(ids) >= most:", "dataset"),
    ("dataset", "max(ids) < vocab_size:", "max(ids) <= vocab_size:", "dataset"),
    ("dataset", "left_out.records += len(prompts)", "left_out.records += 1", "dataset"),
    ("dataset", "self.first = self.first or f\"{where}: {error}\"", "self.first = f\"{where}: {error}\"", "dataset"),
    ("checkpoint/engine_maps", "return array[indices]", "return array[: len(indices)]", "engine_maps"),
    ("checkpoint/engine_maps", "(maps < 0) | (maps >= num_experts)", "(maps < 0) | (maps > num_experts)", "engine_maps"),
    ("checkpoint/engine_maps", "(counts.sum(axis=1) == 0).any()", "(counts.sum(axis=1) == 0).all()", "engine_maps"),
    ("checkpoint/engine_maps", "found.num_devices not in (None, topology.ep_size)", "found.num_devices not in (None, topology.ep_size, 1)", "engine_maps"),
    ("checkpoint/engine_maps", "return np.repeat(array, layers, axis=0)", "return np.repeat(array, layers + 1, axis=0)", "engine_maps"),
    ("checkpoint/engine_routes", "return np.where(physical < 0, -1,", "return np.where(physical < 0, 0,", "engine_routes"),
    ("checkpoint/engine_routes", '(experts[begin:end] >= 0).all()', '(experts[begin:end] >= 0).any()', "engine_routes"),
    ("checkpoint/engine_routes", 'record["positions"][begin] == 0 and', 'record["positions"][begin] >= 0 and', "engine_routes"),
    ("checkpoint/engine_routes", "([*prompt, *sampled][:-1], prompt)", "([*prompt, *sampled][1:], prompt)", "engine_routes"),
    ("checkpoint/engine_routes", "first > 0 and first >= len(prompts)", "first > 0 and first > len(prompts)", "engine_routes"),
    ("checkpoint/engine_routes", "np.where(first + np.arange(len(tokens)) < len(prompt), PREFILL, DECODE)", "np.where(np.arange(len(tokens)) < len(prompt), PREFILL, DECODE)", "engine_routes"),
    ("checkpoint/engine_routes", "for layers in (moe_depth(model), f.num_layers):", "for layers in (f.num_layers, moe_depth(model)):", "engine_routes"),
    ("checkpoint/layout", 'int(match["layer"]) >= num_hidden_layers or PREDICTION', 'int(match["layer"]) > num_hidden_layers or PREDICTION', "checkpoint:layout or layers or prediction or named or tensor"),
    ("files", "if len(content) > limit:", "if len(content) >= limit:", "outputs trace dataset"),
    ("files", "if room > free:", "if room > free + 1e18:", "outputs"),
    ("files", "staged.unlink(missing_ok=True)\n\n\ndef _create_private", "pass\n\n\ndef _create_private", "outputs"),
    ("files", "if target in source.parents:", "if source in source.parents:", "outputs"),
    ("files", "finally:\n        shutil.rmtree(staged, ignore_errors=True)", "finally:\n        pass", "outputs"),
    ("files", "if not path.exists():\n            old.replace(path)", "if path.exists():\n            old.replace(path)", "outputs"),
    ("files", "if set(arrays) != names:", "if not set(arrays) >= names:", "outputs plan trace"),
    ("streams", "(done + r + 0.5) / total", "(r + 0.5) / total", "streams"),
    ("streams", "drawn = self._requests / (self._requests - 1)", "drawn = 1.0", "streams"),
    ("streams", "chosen[of_shard == i]", "chosen[of_shard >= i]", "streams"),
    ("streams", "if tokens > fit:", "if tokens >= 2 * fit:", "streams"),
    ("trace", "self._next_shard = 1 + max(", "self._next_shard = 0 + max(", "trace"),
    ("trace", "trace.left_out + int(impossible.sum())", "int(impossible.sum())", "trace routing streams"),
    ("trace", "if self.pending_tokens >= self.shard_tokens:", "if self.pending_tokens > self.shard_tokens:", "trace"),
    ("trace", 'self._pending, self.pending_tokens = [], 0', 'self._pending = []', "trace"),
    ("metrics", "last_sent[source] = last_node[source // per_node] = t", "last_sent[source] = t", "metrics"),
    ("metrics", "votes[rank] > best:", "votes[rank] >= best:", "metrics"),
    ("capacity", "new_b -= work[q, b]", "new_b -= work[q, a]", "placement_joint requests_capacity"),
    ("capacity", "chosen = np.where(filled < size, total, np.inf).argmin(axis=1)", "chosen = np.where(filled <= size, total, np.inf).argmin(axis=1)", "methods_eplb"),
    ("requests/scheduler", "self._next = (group + 1) % self._groups", "self._next = (self._next + 1) % self._groups", "online balancer requests_capacity"),
    ("requests/scheduler", "self._arrivals = before.arrivals\n\n\nclass", "self._arrivals = 0\n\n\nclass", "online balancer requests_capacity"),
    ("requests/policy", "prices=np.tile(self.prices, copies)", "prices=np.repeat(self.prices, copies)", "online balancer requests_capacity router_parts scorer"),
    ("requests/capacity", "self._expected[assigned.group] -= assigned.work", "self._expected[assigned.group] -= assigned.prompt_work", "requests_capacity"),
    ("requests/capacity", "uncached = np.maximum(uncached - cached, 0)", "uncached = np.maximum(cached - uncached, 0)", "requests_capacity"),
    ("requests/capacity", "if len(self._waiting) <= self.settings.max_wait:", "if len(self._waiting) < self.settings.max_wait:", "requests_capacity"),
    ("requests/window", "self._timer.cancel()", "pass", "requests_window"),
    ("requests/window", "if not self._items:\n            self._end", "if self._end < self._clock() or True:\n            self._end", "requests_window"),
    ("engines/balancer", "when <= as_of - GRACE", "when <= as_of + GRACE", "balancer"),
    ("engines/balancer", "for _ in range(known - requests):", "for _ in range(known - requests + 1):", "balancer"),
    ("engines/balancer", "self._sent = before._sent", "pass", "balancer"),
    ("tokens/kernels", "weight = min(seen[slot], RUNNING_LIMIT) + RUNNING_PRIOR\n        seen[slot] += 1", "seen[slot] += 1\n        weight = min(seen[slot], RUNNING_LIMIT) + RUNNING_PRIOR", "tokens_slices"),
    ("tokens/kernels", "left[g] -= at_limit", "left[g] -= 0", "tokens_slices"),
    ("tokens/kernels", "if over <= least:", "if over < least:", "tokens_slices tokens_backends"),
    ("tokens/kernels", "base += num_experts if j < ordered else 0\n                base += 0 if j < ordered else num_experts\n            out[t, s] = rest", "base += num_experts if j <= ordered else 0\n                base += 0 if j < ordered else num_experts\n            out[t, s] = rest", "tokens_slices"),
    ("replayer", "home[inside] = d * S + evidence", "home[inside] = d + evidence", "replayer"),
    ("replayer", "order[: full * settings.batch_tokens].reshape(full, -1)", "order[-full * settings.batch_tokens :].reshape(full, -1)", "replayer"),
    ("cost", "rows.T * combine_row_bytes(shape, links)", "rows * combine_row_bytes(shape, links)", "cost"),
    ("cost", "moved.sum(axis=0).max(), moved.sum(axis=1).max()", "moved.sum(axis=1).max(), moved.sum(axis=1).max()", "cost"),
    ("cost", "(doublings if between else 1)", "(doublings if between else doublings)", "cost"),
    ("cost", "SHUFFLED_MORE * max(rows - FIRST_ROWS, 0)", "SHUFFLED_MORE * max(rows, 0)", "cost"),
    ("rowcosts", "forwarded = np.where(same | (first == every), 0, rows)", "forwarded = np.where(same, 0, rows)", "rowcosts"),
    ("rowcosts", "decode = float(np.mean(phase == DECODE))", "decode = float(np.mean(phase != DECODE))", "placement_hierarchy:costs"),
    ("affinity", "rows = unknown[start : start + block]", "rows = unknown[start : start + block - 1]", "affinity"),
    ("affinity", "(token_ids >= 0) & (token_ids < num_rows - 1)", "(token_ids >= 0) & (token_ids < num_rows)", "affinity tokens_slices"),
    ("expectation", "settings.redundant_experts > 0, topology, shape", "settings.redundant_experts >= 0, topology, shape", "solver"),
    ("splitter", "common.data >= OVERLAP", "common.data > OVERLAP", "splitter"),
    ("splitter", "requests[s] <= most", "requests[s] < most", "splitter"),
    ("moving", "has[:, target] & ~had[:, target]", "has[:, target] | ~had[:, target]", "moving"),
    ("moving", "np.where(near.any(axis=1), near.argmax(axis=1), had.argmax(axis=1))", "had.argmax(axis=1)", "moving"),
    ("watch", "self.pairs >= ENOUGH_PAIRS", "self.pairs > ENOUGH_PAIRS", "watch adapt:decide or drift or judged"),
    ("watch", "past: Totals = {} if restarted else before.totals", "past: Totals = before.totals", "watch"),
    ("adapt/decide", "elif seen.known_lar is not None:\n            break", "else:\n            break", "adapt:drift"),
    ("adapt/decide", "if gain < (-s.margin if again else s.least_share * predicted):", "if gain <= (-s.margin if again else 0):", "adapt:swap"),
    ("adapt/recording", "self._held() - MORE * s.requests, 0)", "self._held() - s.requests, 0)", "adapt:recorded or requests"),
    ("adapt/recording", "self._dropped += count", "self._dropped = count", "adapt:recorded or requests"),
    ("adapt/solving", "np.arange(job.older, trace.num_requests)", "np.arange(trace.num_requests)", "adapt:before_a_change"),
    ("placement/moves", "state.near[new, m] = x if state.near[new, m] < 0 else min(state.near[new, m], x)", "state.near[new, m] = x", "placement_moves:every_move"),
    ("placement/moves", "if state.primary[b] == y:\n            state.primary[b] = x", "if state.primary[b] == x:\n            state.primary[b] = y", "placement_moves:every_move"),
    ("placement/homes", "for other in range(rank + 1, (node + 1) * size):", "for other in range(rank + 1, (node + 1) * size - 1):", "placement_moves:every_move"),
    ("placement/copies", "per_node[home, node_of[other]]", "per_node[home, node_of[now]]", "placement_copies"),
    ("placement/copies", "change -= 0.0 if keeps_node else", "change += 0.0 if keeps_node else", "placement_copies"),
    ("placement/layers", "return [min(self.found, key=lambda one: one.total(price)) for price in load_prices]", "return [min(self.found, key=lambda one: one.total(first)) for price in load_prices]", "placement_cocluster:price"),
    ("placement/layers", "return self.cost + self.dues + load_price * self.load", "return self.cost + load_price * self.load", "placement_cocluster:price"),
    ("placement/ours", "np.repeat(node, per_node, axis=1)", "np.tile(node, (1, per_node, 1))", "placement_hierarchy:by_hand"),
    ("placement/hierarchy", "first[experts[led]] = ranks[labels[led]]", "first[experts] = ranks[labels]", "placement_hierarchy:divided"),
    ("placement/loads", "others[x, y, j] = most", "others[x, y, j] = first", "placement_moves:highest"),
    ("methods/grouping", "room[g] -= 1", "room[g] -= 0", "methods_grace methods_moetuner"),
    ("methods/paper_policies", "devices[:, l - self.lookback : l][:, ::-1]", "devices[:, l - self.lookback : l]", "methods_paper replayer"),
    ("methods/paper_policies", "token_wins = token_confidence > path_confidence", "token_wins = token_confidence >= path_confidence", "methods_paper"),
    ("copychoice", "turns[-1] = turns.get(-1, 0) + (choosing & beyond)", "turns[-1] = turns.get(-1, 0) + choosing", "metrics copychoice:eight"),
    ("copychoice", "away = -1 if r == preferred else (r - source) % num_ranks", "away = (r - source) % num_ranks", "copychoice:loops or anyway"),
    ("runtime/copies", "allowed &= np.cumsum(allowed, axis=2) == 1  # the first of two copies on a rank", "pass", "copychoice:two_copies"),
    ("runtime/shuffler", "self._history.begin(new_slots)", "pass", "shuffle"),
    ("runtime/shuffler", "self._token_ids, self._of_batch = token_ids, None", "self._token_ids = token_ids", "shuffle"),
    ("runtime/shuffler_device", "if self._history is not None:\n            self.reserve(self._history.num_slots)", "pass", "shuffler_device"),
    ("engines/layer", "self._unseen = self._unseen[:0]", "pass", "slots"),
    ("engines/layer", "np.arange(self._used_slots)", "np.arange(self._used_slots - 1)", "slots"),
    ("engines/step", "again > np.minimum(self._drafts, first)", "again > self._drafts", "sglang_parts vllm_parts"),
    ("engines/static", "self._next[slots] = last + 1", "self._next[slots] = last", "slots static"),
    ("engines/recorder_rows", "self.rows[slots] = 0", "pass", "live_recorder:slot or dropped"),
    ("engines/recorder_rows", "self.used -= len(at)", "self.used -= 0", "live_recorder:rows_come"),
    ("engines/live/swap", 'if len(numbers) > 1:', 'if len(numbers) > 2:', "live_swap:rank_cannot or different"),
    ("core", "np.repeat(offsets[:-1][chosen] - new_offsets[:-1], lengths)", "np.repeat(offsets[1:][chosen] - new_offsets[1:], lengths)", "core"),
    ("core", "self.physical_to_logical_map + self.num_experts * np.arange(layers)[:, None]", "self.physical_to_logical_map + np.arange(layers)[:, None]", "core"),
    ("core", "[[len(prompt)], prompt, self.token_ids[self.rows(r)]]", "[prompt, self.token_ids[self.rows(r)]]", "core"),
    ("core", "if not served.all():", "if not served.any():", "core"),
    ("core", "np.where(copies >= 0, copies // self.experts_per_rank, -1)", "copies // self.experts_per_rank", "core metrics copychoice"),
    ("topology", "self.ep_size % self.num_nodes != 0", "self.num_nodes > self.ep_size", "core"),
    ("topology", "unknown = name in (\"hidden_size\", \"expert_size\") and 0 in (mine, theirs)", "unknown = name in (\"hidden_size\",) and 0 in (mine, theirs)", "core"),
    ("solver", "new = plan.placement.hosts & ~previous.placement.hosts", "new = plan.placement.hosts ^ previous.placement.hosts", "warm_start"),
    ("solver", "if copies != settings.redundant_experts:", "if copies > settings.redundant_experts:", "warm_start"),
    ("online", "assigned[told].request < r - unfinished", "assigned[told].request <= r - unfinished", "online"),
    ("online", "sorted(assigned, key=lambda one: one.request)", "assigned", "online"),
    ("online", "min(mean, float(max_new_tokens))", "max(mean, float(max_new_tokens))", "online balancer"),
    ("requests/prefix", "for key in reversed(self._keys(prompt_ids)[: self._blocks]):", "for key in self._keys(prompt_ids)[: self._blocks]:", "requests_prefix"),
    ("requests/prefix", "while len(known) > self._blocks:", "while len(known) >= self._blocks:", "requests_prefix"),
    ("requests/predictor", "occurrences + UNSEEN)[:, None]", "occurrences)[:, None]", "requests_predictor"),
    ("requests/predictor", "step * (load - limit)", "step * (load - 1)", "requests_predictor"),
    ("requests/predictor", "fits = np.cumsum(sizes[order]) <= most", "fits = np.cumsum(sizes) <= most", "requests_predictor"),
    ("tokens/regression", "seen = t - offsets[r]", "seen = t", "tokens_predictor"),
    ("tokens/regression", "previous[~has_previous, 0] = 1 + E", "previous[~has_previous, 0] = E", "tokens_predictor"),
    ("runtime/dispatch", "again = (targets[:, :, None] == targets[:, None, :]).tril(-1).any(dim=2)", "again = (targets[:, :, None] == targets[:, None, :]).tril(-2).any(dim=2)", "dispatch runtime"),
    ("runtime/traffic", "rows[self.rank] = nodes[self.rank // self._width] = 0", "rows[self.rank] = 0", "engine_traffic"),
    ("runtime/rows", "else arrived[j - (j > rank), i]\n            if j == 0", "else arrived[j - (j < rank), i]\n            if j == 0", "runtime parcels shuffle"),
    ("checkpoint/relabel", "np.argsort(order).astype(values.dtype)[values]", "order.astype(values.dtype)[values]", "hash_routed checkpoint"),
    ("checkpoint/relabel", "groups != groups[:, :, :1]", "groups != groups[:, :1]", "checkpoint"),
    ("checkpoint/relabel", "layer.expert_tensor(old, p): layer.expert_tensor(new, p)", "layer.expert_tensor(new, p): layer.expert_tensor(old, p)", "checkpoint"),
    ("checkpoint/verify", "best = 1 if self.correction is None else min(2,", "best = 1 if self.correction is None else min(1,", "checkpoint"),
    ("checkpoint/verify", "ranked[:, count - 1] - ranked[:, count]", "ranked[:, count] - ranked[:, count]", "checkpoint"),
    ("engines/recorder", "run not in (None, self._ended_run)", "run is not None", "live_recorder"),
    ("engines/recorder", "self._next_save = now + self._save_seconds\n            self._session", "self._next_save = now\n            self._session", "live_recorder"),
    ("engines/recorder_session", "slice(self.control.max_tokens - self.tokens)", "slice(self.control.max_tokens)", "live_recorder:counts"),
    ("engines/recorder_session", "rows.positions > self._requests.highest[slots]", "rows.positions >= self._requests.highest[slots]", "live_recorder"),
    ("engines/recorder_session", "np.where(rows.positions < len(prompt), PREFILL, DECODE)", "np.where(rows.positions <= len(prompt), PREFILL, DECODE)", "live_recorder"),
    ("engines/recorder_merge", "array + total.get(name, 0)", "array", "live_recorder cli_record"),
    ("engines/requests", "balancer.follow(self._balancer)", "pass", "balancer sglang_parts vllm_parts engine_counters"),
    ("engines/requests", "self._balancer.unknown_tokens - self._unknown", "self._balancer.unknown_tokens", "sglang_parts vllm_parts engine_counters balancer"),
    ("engines/ownership", "fcntl.flock(descriptor, fcntl.LOCK_SH)", "pass", "ownership"),
    ("engines/ownership", "share(_open(folder))", "_open(folder)", "ownership"),
    ("engines/hooks", 'return version.split("+")[0] == tried', "return version == tried", "hooks doctor"),
    ("engines/hooks", "if parameter.kind not in variadic", "if parameter.kind in variadic or True", "hooks"),
    ("engines/live/canary", "places = torch.arange(1, len(words) + 1", "places = torch.arange(0, len(words)", "live_swap:checksums"),
    ("engines/live/canary", "(found != expected).any(dim=1)", "(found != expected).all(dim=1)", "live_swap:differ or checksums"),
    ("engines/live/files", "if plan_number(plan) != number:", "if plan_number(plan) == 0:", "live_swap:staged"),
    ("engines/live/files", "0 < number <= MOST_NUMBER", "0 < number < MOST_NUMBER", "live_swap:numbers"),
    ("engines/sglang/requests", "if now - self._looked < REFRESH:", "if now - self._looked > REFRESH:", "sglang_parts"),
    ("engines/sglang/requests", "if not isinstance(message, requests):", "if isinstance(message, requests):", "sglang_parts"),
    ("engines/vllm/placement", "done |= bool(", "done = bool(", "vllm_parts"),
    ("engines/vllm/placement", "if expert_id >= self.plan.fingerprint.num_experts:", "if expert_id > self.plan.fingerprint.num_experts:", "vllm_parts"),
    ("engines/vllm/placement", "if found != wanted:", "if found > wanted:", "vllm_parts"),
    ("runtime/parcels", "np.maximum(2 ** np.ceil(np.log2(most))", "np.maximum(2 ** np.floor(np.log2(most))", "parcels"),
    ("runtime/parcels", "np.maximum(most, sent, out=most)", "most[:] = sent", "parcels"),
    ("runtime/parcels", "starts - _starts(counts) * pitch", "starts - _starts(counts)", "parcels"),
    ("runtime/static", "if rows % size != 0:", "if rows < size:", "static"),
    ("runtime/static", "masked_fill((index < 0)[:, None], 0)", "masked_fill((index < 1)[:, None], 0)", "static shuffler_device"),
    ("runtime/agreement", "(digests != digests[0]).any(axis=2)", "(digests != digests[0]).all(axis=2)", "agreement"),
    ("runtime/shuffler_device", "self._previous[:, slots] = self._rows[:, -1:].int()", "self._previous[:, slots] = 0", "shuffler_device"),
    ("runtime/shuffler_device", "if self._turns is not None and moe_layer == self._layers - 1:", "if self._turns is not None and moe_layer == 0:", "shuffler_device"),
    ("runtime/scores", "weight = times.clamp(max=RUNNING_LIMIT) + RUNNING_PRIOR", "weight = times.clamp(max=RUNNING_PRIOR) + RUNNING_LIMIT", "shuffler_device"),
    ("engines/traffic", "sum(sent) - inside", "sum(sent)", "engine_traffic"),
    ("engines/traffic", "if len(sent) > MOST_PAIRED:", "if len(sent) >= MOST_PAIRED:", "engine_traffic"),
    ("methods/eldr", "far = np.minimum(far, np.maximum(1 - rows @ rows[chosen[-1]], 0.0))", "far = np.maximum(1 - rows @ rows[chosen[-1]], 0.0)", "methods_eldr"),
    ("methods/eldr", "np.where(frequency > 0, np.arange(vocabulary), vocabulary)", "np.arange(vocabulary)", "methods_eldr"),
    ("methods/exflow", "out += cost[:, labels[layer + 1]] @ counts[layer].T", "out += cost[:, labels[layer + 1]] @ counts[layer]", "methods_exflow"),
    ("methods/exflow", "if total < least - 1e-9:", "if total > least - 1e-9 or best is None:", "methods_exflow"),
    ("methods/grace", "running[-1] * count / (count + 1) - 1e-9)) + 1]", "running[-1] * count / (count + 1) - 1e-9))]", "methods_grace"),
    ("methods/grace", "count = min(max(1, int(skew)), len(own) - 1)", "count = max(1, int(skew))", "methods_grace"),
    ("methods/eplb", "np.arange(num_nodes)[None, :, None] * (experts // num_nodes)", "np.arange(num_nodes)[None, :, None] * (num_replicas // num_nodes)", "methods_eplb"),
    ("methods/paper_tables", "devices[here, l - lookback : l][:, ::-1]", "devices[here, l - lookback : l]", "methods_paper_tables"),
    ("methods/paper_tables", "ranks = np.where(ranks < 0, shares[-1].argmax(), ranks)", "ranks = np.where(ranks < 0, 0, ranks)", "methods_paper_tables"),
    ("calibration", "pairs.size not in (G, N)", "pairs.size not in (G, N, 1)", "network links cost"),
    ("calibration", "given[node[:, None], node])", "given[node, node[:, None]])", "network links cost"),
    ("calibration", "fastest = seconds[seconds > 0].min(initial=np.inf)", "fastest = seconds[seconds > 0].max(initial=0)", "network links cost"),
    ("payoff", "rows = others * uniform_remote_ranks(G, E, K) / (G - 1)", "rows = others * uniform_remote_ranks(G, E, K) / G", "payoff"),
    ("payoff", "balanced = min(plan.busiest_pairs", "balanced = max(plan.busiest_pairs", "payoff"),
    ("concentration", "first + (sizes - 1) // 2", "first + sizes // 2", "concentration"),
    ("concentration", "hottest[:, top_k] if counts.shape[1] > top_k", "hottest[:, top_k - 1] if counts.shape[1] > top_k", "concentration"),
    ("checkpoint/shards", "if at != size:", "if at > size:", "checkpoint"),
    ("checkpoint/shards", "if tensor.offset != at:", "if tensor.offset < at:", "checkpoint"),
    ("checkpoint/shards", 'text += b" " * (-len(text) % 8)', "pass", "checkpoint"),
    ("checkpoint/shards", "row, to = tensor.row(e), tensor.row(p)", "row, to = tensor.row(p), tensor.row(e)", "checkpoint"),
    ("engines/counters", "child.inc(value - self._published.get((name, labels), 0))", "child.inc(value)", "engine_counters"),
]
# fmt: on


def outcome(mutant: tuple[str, str, str, str], work: Path) -> str:
    """Make the fault in the copy, run the tests, and take it back."""
    module, old, new, tests = mutant
    path = work / f"src/semmoe/{module}.py"
    source = path.read_text(encoding="utf-8")
    if source.count(old) != 1:
        return f"found {source.count(old)} times"
    path.write_text(source.replace(old, new), encoding="utf-8")
    try:
        return "survived" if all(passes(one, work) for one in groups(tests)) else "killed"
    except subprocess.TimeoutExpired:
        return "killed"
    finally:
        path.write_text(source, encoding="utf-8")


def groups(tests: str) -> list[list[str]]:
    """The arguments of pytest for each run: files together, and files with an expression alone."""
    before, _, expression = tests.partition(":")
    *files, last = before.split()
    named = [f"tests/test_{name}.py" for name in files]
    if not expression:
        return [[*named, f"tests/test_{last}.py"]]
    return [*([named] if named else []), [f"tests/test_{last}.py", "-k", expression]]


def passes(arguments: list[str], work: Path) -> bool:
    environment = os.environ | {"PYTHONPATH": str(work / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-m", "not slow", *arguments]
    environment |= {} if "tests/test_jit.py" in arguments else {"NUMBA_DISABLE_JIT": "1"}
    return not subprocess.run(command, cwd=work, env=environment, capture_output=True, timeout=SECONDS).returncode


def main() -> None:
    words = sys.argv[1:]
    chosen = [mutant for mutant in MUTANTS if not words or any(word in " ".join(mutant) for word in words)]
    counts = {"killed": 0, "survived": 0}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("src", "tests", "examples", "docs"):
            shutil.copytree(ROOT / name, Path(folder) / name)
        shutil.copy(ROOT / "pyproject.toml", folder)
        work = Path(folder)
        for tests in dict.fromkeys(mutant[3] for mutant in chosen):
            if not all(passes(one, work) for one in groups(tests)):
                sys.exit(f"{tests}: these tests fail without a fault")
        for mutant in chosen:
            found = outcome(mutant, work)
            counts[found] = counts.get(found, 0) + 1
            if found != "killed":
                print(f"{found}: src/semmoe/{mutant[0]}.py\n  - {mutant[1]}\n  + {mutant[2]}", flush=True)
    print(", ".join(f"{n} {name}" for name, n in counts.items()))
    sys.exit(counts["killed"] < len(chosen))


if __name__ == "__main__":
    main()
