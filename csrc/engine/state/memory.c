/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's memory: made once at start, so that the page path never allocates. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/state/ahead.h"
#include "engine/state/memory.h"
#include "engine/state/page.h"

/* Of the staging buffers one in so many is for block devices alone. */
#define BLOCK_SHARE 4u

static int map_volatile(struct isw_engine *e, size_t remote_bytes, struct isw_error *error)
{
	uint32_t staging = e->config.staging_pages;
	uint64_t request_pages = e->config.request_bytes_max / ISW_PAGE_BYTES;
	uint32_t ahead = e->config.flags & ISW_ENGINE_READ_AHEAD ? ISWI_AHEAD_GROUPS : 0;
	/*
	 * Each write or copy holds a staging buffer, each leg one of a pair or half of a bare
	 * hedge, each read of a group ahead that group, each other read a page of a request.
	 */
	uint32_t pairs = iswi_hedges(e) ? ISWI_PAIRS : 0, bare = iswi_hedges(e) ? ISWI_BARE : 0;
	uint64_t far_pages = e->config.far_bytes ? ISWI_FAR_REQUEST_BYTES_MAX / ISW_PAGE_BYTES : 0;
	uint64_t ops = staging + e->config.requests_max * request_pages + ahead +
		       2 * (pairs + bare) + ISWI_FAR_READS_MAX * far_pages;
	uint64_t leg_bytes =
		ISWI_MIN(ISWI_MAX(request_pages, far_pages), ISWI_XFER_PAGES_MAX) * ISW_PAGE_BYTES;
	uint32_t readers = iswi_hedges(e) ? e->config.backup_readers : 0;
	uint64_t end = 0, shards_at, uses_at, entries_at, bits_at, ops_at, remotes_at, ahead_at,
		 ahead_data_at, pairs_at, readers_at;
	unsigned char *base;

	e->staging_alloc.words = (staging + 63) / 64;
	shards_at = iswi_lay_out(&end, ISWI_SHARDS * sizeof(struct iswi_shard));
	uses_at = iswi_lay_out(&end, staging * sizeof(struct iswi_slot_use));
	entries_at = iswi_lay_out(&end, staging * sizeof(struct iswi_entry));
	bits_at = iswi_lay_out(&end, e->staging_alloc.words * sizeof(uint64_t));
	ops_at = iswi_lay_out(&end, ops * sizeof(struct iswi_op));
	remotes_at = iswi_lay_out(&end, e->config.remotes_max * remote_bytes);
	ahead_at = iswi_lay_out(&end, ahead ? sizeof(struct iswi_ahead) : 0);
	ahead_data_at = iswi_lay_out(&end, ahead * ISWI_AHEAD_GROUP_BYTES);
	pairs_at = iswi_lay_out(&end, pairs * ISWI_PAIR_BYTES);
	readers_at = iswi_lay_out(&end, readers * leg_bytes);
	base = mmap(NULL, end, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE,
		    -1, 0);
	if (base == MAP_FAILED)
		return iswi_error(error, -errno, "cannot get %llu MiB of memory for the device",
				  (unsigned long long)(end >> 20));
	/* Pages that were read ahead are there in clear. */
	(void)madvise(base, end, MADV_DONTDUMP);
	e->volatile_memory = base;
	e->volatile_bytes = end;
	e->shards = (struct iswi_shard *)(base + shards_at);
	e->slot_uses = (struct iswi_slot_use *)(base + uses_at);
	e->entries = (struct iswi_entry *)(base + entries_at);
	e->staging_alloc.free_bits = (uint64_t *)(base + bits_at);
	e->ops = (struct iswi_op *)(base + ops_at);
	e->remotes = (struct iswi_remote *)(base + remotes_at);
	e->pairs_data = base + pairs_at;
	atomic_init(&e->pairs_free, pairs ? ISWI_PAIRS_ALL : 0);
	atomic_init(&e->bare_free, bare);
	e->readers_data = base + readers_at;
	e->leg_bytes = leg_bytes;
	e->ahead = ahead ? (struct iswi_ahead *)(base + ahead_at) : NULL;
	for (uint32_t i = 0; i < ahead; i++)
		e->ahead->groups[i].data = base + ahead_data_at + i * ISWI_AHEAD_GROUP_BYTES;
	for (uint64_t i = 0; i < ops; i++) {
		e->ops[i].engine = e;
		e->ops[i].next = i + 1 < ops ? &e->ops[i + 1] : NULL;
	}
	e->ops_free = e->ops;
	return 0;
}

int iswi_memory_create(struct isw_engine *e, size_t remote_bytes, struct isw_error *error)
{
	uint32_t staging = e->config.staging_pages;
	int code;

	code = iswi_arena_map(e, error);
	if (code)
		return code;
	code = map_volatile(e, remote_bytes, error);
	if (code)
		return code;

	for (uint32_t i = 0; i < ISWI_SHARDS; i++) {
		pthread_mutex_init(&e->shards[i].lock, NULL);
		memset(e->shards[i].hash, 0xff, sizeof(e->shards[i].hash));
		e->shards[i].ahead = ISWI_NONE;
	}
	for (uint32_t i = 0; i < staging; i++) {
		e->entries[i].hash_next = i + 1 < staging ? i + 1 : ISWI_NONE;
		e->staging_alloc.free_bits[i / 64] |= 1ull << i % 64;
	}
	e->entries_free = 0;
	pthread_mutex_init(&e->entries_lock, NULL);
	pthread_mutex_init(&e->staging_alloc.lock, NULL);
	pthread_mutex_init(&e->ops_lock, NULL);
	pthread_mutex_init(&e->waiting.lock, NULL);
	pthread_mutex_init(&e->waiting_far.lock, NULL);
	if (e->ahead) {
		pthread_mutex_init(&e->ahead->lock, NULL);
		atomic_init(&e->ahead->credit, ISWI_AHEAD_CREDIT_FIRST);
	}
	e->waiting.tail = &e->waiting.head;
	e->waiting_far.tail = &e->waiting_far.head;
	return 0;
}

void iswi_memory_destroy(struct isw_engine *e)
{
	if (e->volatile_memory)
		munmap(e->volatile_memory, e->volatile_bytes);
	iswi_arena_unmap(e);
}

/* Length of the run of free buffers that starts at `from`, at most `want`. */
static uint32_t free_run(const struct isw_engine *e, uint32_t from, uint32_t want)
{
	uint32_t n = 0;

	while (n < want && from + n < e->config.staging_pages) {
		uint32_t at = from + n;
		uint64_t used = ~e->staging_alloc.free_bits[at / 64] >> at % 64;
		uint32_t here = used ? (uint32_t)__builtin_ctzll(used) : 64 - at % 64;

		n += here;
		if (here < 64 - at % 64)
			break;
	}
	return ISWI_MIN(n, want);
}

static bool next_free(const struct isw_engine *e, uint32_t from, uint32_t *at_out)
{
	for (uint32_t word = from / 64; word < e->staging_alloc.words; word++) {
		uint64_t bits = e->staging_alloc.free_bits[word];

		if (word == from / 64)
			bits &= ~0ull << from % 64;
		if (bits) {
			*at_out = word * 64 + (uint32_t)__builtin_ctzll(bits);
			return true;
		}
	}
	return false;
}

/* Under the lock. Next fit: buffers given back early lie behind the cursor and may form runs. */
static uint32_t take_run(struct isw_engine *e, uint32_t want, uint32_t *slot_out)
{
	uint32_t at = 0, n = 0;

	if (next_free(e, e->staging_alloc.cursor, &at) || next_free(e, 0, &at)) {
		n = free_run(e, at, want);
		for (uint32_t i = at; i < at + n; i++)
			e->staging_alloc.free_bits[i / 64] &= ~(1ull << i % 64);
		e->staging_alloc.cursor = at + n < e->config.staging_pages ? at + n : 0;
		e->staging_alloc.used += n;
	}
	*slot_out = at;
	return n;
}

uint32_t iswi_staging_take(struct isw_engine *e, uint32_t want, bool far, uint32_t *slot_out)
{
	uint32_t far_max = e->config.staging_pages - e->config.staging_pages / BLOCK_SHARE, n = 0;

	pthread_mutex_lock(&e->staging_alloc.lock);
	/* What a predecessor has staged may be more. */
	if (far)
		want = ISWI_MIN(want, far_max - ISWI_MIN(far_max, e->staging_alloc.far));
	if (want)
		n = take_run(e, want, slot_out);
	for (uint32_t i = 0; far && i < n; i++)
		e->slot_uses[*slot_out + i].far = true;
	e->staging_alloc.far += far ? n : 0;
	pthread_mutex_unlock(&e->staging_alloc.lock);
	return n;
}

uint32_t iswi_staging_take_spare(struct isw_engine *e, uint32_t want, uint32_t spare_max,
				 uint32_t *slot_out)
{
	uint32_t half = e->config.staging_pages / 2, n = 0;

	pthread_mutex_lock(&e->staging_alloc.lock);
	want = e->staging_alloc.copies < spare_max
		       ? ISWI_MIN(want, spare_max - e->staging_alloc.copies)
		       : 0;
	if (want && e->staging_alloc.used < half)
		n = take_run(e, ISWI_MIN(want, half - e->staging_alloc.used), slot_out);
	for (uint32_t i = 0; i < n; i++)
		e->slot_uses[*slot_out + i].copy = true;
	e->staging_alloc.copies += n;
	pthread_mutex_unlock(&e->staging_alloc.lock);
	return n;
}

void iswi_staging_give(struct isw_engine *e, uint32_t slot)
{
	pthread_mutex_lock(&e->staging_alloc.lock);
	e->staging_alloc.free_bits[slot / 64] |= 1ull << slot % 64;
	e->staging_alloc.used--;
	if (e->slot_uses[slot].copy)
		e->staging_alloc.copies--;
	if (e->slot_uses[slot].far)
		e->staging_alloc.far--;
	e->slot_uses[slot].copy = e->slot_uses[slot].far = false;
	pthread_mutex_unlock(&e->staging_alloc.lock);
}

void iswi_staging_claim(struct isw_engine *e, uint32_t slot, bool far)
{
	pthread_mutex_lock(&e->staging_alloc.lock);
	e->staging_alloc.free_bits[slot / 64] &= ~(1ull << slot % 64);
	e->staging_alloc.used++;
	e->slot_uses[slot].far = far;
	e->staging_alloc.far += far;
	pthread_mutex_unlock(&e->staging_alloc.lock);
}

void iswi_staging_count(struct isw_engine *e, uint32_t *used_out, uint32_t *copies_out)
{
	pthread_mutex_lock(&e->staging_alloc.lock);
	*used_out = e->staging_alloc.used;
	*copies_out = e->staging_alloc.copies;
	pthread_mutex_unlock(&e->staging_alloc.lock);
}

struct iswi_op *iswi_op_take(struct isw_engine *e)
{
	struct iswi_op *op;

	pthread_mutex_lock(&e->ops_lock);
	op = e->ops_free;
	e->ops_free = op->next; /* never NULL: see map_volatile */
	pthread_mutex_unlock(&e->ops_lock);
	op->next = NULL;
	op->xfer.next = NULL;
	op->req = NULL;
	op->tried = 0;
	op->measured_ns = 0;
	op->copy = false;
	op->pull = false;
	op->last = false;
	op->slow = false;
	op->owed = false;
	op->twin = NULL;
	op->xfer.slow_us = 0;
	return op;
}

void iswi_op_give(struct isw_engine *e, struct iswi_op *op)
{
	pthread_mutex_lock(&e->ops_lock);
	op->next = e->ops_free;
	e->ops_free = op;
	pthread_mutex_unlock(&e->ops_lock);
}
