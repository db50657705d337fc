/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stepped engine for tests that order every event by hand. Pages hold one 64-bit value all over,
 * so that a torn, stale or foreign page shows. Functions named after a check end the program when
 * it fails.
 */
#ifndef ISW_TEST_ENGINE_FIXTURE_H
#define ISW_TEST_ENGINE_FIXTURE_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "engine/state/ahead.h"
#include "isw.h"
#include "seal_fixture.h"
#include "sim/sim.h"
#include "tests.h"

#define SLAB_PAGES        8u
#define SLABS             4u
#define PAGES             (SLABS * SLAB_PAGES)
#define STAGING           16u
#define REQUEST_PAGES_MAX 8u
#define IDS_MAX           512u
#define KINDS             16u
#define PENDING           1 /* not an errno: the request is not done */
#define TORN              UINT64_MAX

struct world {
	isw_engine *e;
	/* By request id: what became of it, and the order in which requests were done. */
	int error[IDS_MAX];
	uint32_t done_order[IDS_MAX], done_count;
	uint64_t got[IDS_MAX][REQUEST_PAGES_MAX];
	uint32_t events[KINDS];
	struct isw_event last[KINDS];
	uint64_t generations;
	struct world *successor; /* ends before this one */
};

static inline struct isw_engine_config world_config(uint32_t flags)
{
	return (struct isw_engine_config){
		.size_bytes = PAGES * ISW_PAGE_BYTES,
		.slab_bytes = SLAB_PAGES * ISW_PAGE_BYTES,
		.staging_pages = STAGING,
		.request_bytes_max = REQUEST_PAGES_MAX * ISW_PAGE_BYTES,
		.requests_max = 64,
		.remotes_max = 4,
		.state_fd = -1,
		.backup_write_bytes_max = 4 * ISW_PAGE_BYTES,
		.flags = flags,
		.seal_key_fd = flags & ISW_ENGINE_SEAL ? test_key_fd() : -1,
	};
}

static inline struct world *world_of(const struct isw_engine_config *config)
{
	struct world *w = calloc(1, sizeof(*w));
	struct isw_error error = {0};

	CHECK(w);
	CHECK_OK(isw_sim_create(config, &w->e, &error), error);
	for (uint32_t i = 0; i < IDS_MAX; i++)
		w->error[i] = PENDING;
	return w;
}

UNUSED_OK static struct world *world_new(uint32_t flags)
{
	struct isw_engine_config config = world_config(flags);

	return world_of(&config);
}

/* A world of another config: the statements change it. */
#define WORLD_BUT(...)                                                                             \
	({                                                                                         \
		struct isw_engine_config config = world_config(0);                                 \
                                                                                                   \
		__VA_ARGS__;                                                                       \
		world_of(&config);                                                                 \
	})

/* ---------------------------------------------------------------------- looking */

static inline uint64_t value_at(const unsigned char *page)
{
	uint64_t first, word;

	memcpy(&first, page, sizeof(first));
	for (uint32_t i = 8; i < ISW_PAGE_BYTES; i += 8) {
		memcpy(&word, page + i, sizeof(word));
		if (word != first)
			return TORN;
	}
	return first;
}

static inline void reap(struct world *w)
{
	static _Alignas(8) unsigned char data[REQUEST_PAGES_MAX * ISW_PAGE_BYTES];
	struct isw_sim_request done;
	struct isw_event event;

	while (isw_sim_reap(w->e, &done, data, sizeof(data))) {
		CHECK(done.id < IDS_MAX);
		CHECK_EQ(w->error[done.id], PENDING); /* done exactly once */
		w->error[done.id] = done.error;
		w->done_order[w->done_count++] = (uint32_t)done.id;
		for (uint32_t i = 0;
		     (done.op & 0xff) == ISW_SIM_READ && i < done.length / ISW_PAGE_BYTES; i++)
			w->got[done.id][i] = value_at(data + i * ISW_PAGE_BYTES);
	}
	while (isw_engine_events(w->e, &event, 1)) {
		CHECK(event.kind < KINDS);
		w->events[event.kind]++;
		w->last[event.kind] = event;
	}
}

UNUSED_OK static struct isw_engine_stats stats_of(const struct world *w)
{
	struct isw_engine_stats stats;

	isw_engine_stats(w->e, &stats);
	return stats;
}

UNUSED_OK static struct isw_slab_info slab_of(const struct world *w, uint32_t slab)
{
	struct isw_slab_info info;

	CHECK_EQ(isw_engine_slabs(w->e, slab, 1, &info), 1);
	return info;
}

UNUSED_OK static struct isw_remote_info remote_of(const struct world *w, uint32_t remote)
{
	struct isw_remote_info info[4];

	CHECK_EQ(isw_engine_remotes(w->e, 4, info), 4);
	return info[remote];
}

UNUSED_OK static bool is_remote_valid(const struct world *w, uint64_t page)
{
	return iswi_bit(w->e->remote_valid, page);
}

UNUSED_OK static bool is_backup_current(const struct world *w, uint64_t page)
{
	return iswi_bit(w->e->backup_current, page);
}

/* Transfers under way to a donor; those that hold one page, and of which kind. */
UNUSED_OK static uint32_t sent(const struct world *w, uint32_t remote)
{
	return iswi_sim_of(w->e)->donors[remote]->pending_count;
}

UNUSED_OK static uint32_t sent_for(const struct world *w, uint32_t remote, uint64_t page,
				   enum iswi_xfer_kind kind)
{
	const struct iswi_sim_donor *donor = iswi_sim_of(w->e)->donors[remote];
	uint32_t n = 0;

	for (uint32_t i = 0; i < donor->pending_count; i++) {
		const struct iswi_xfer *xfer = donor->pending[i].xfer;
		const struct iswi_op *op = ISWI_CONTAINER(xfer, struct iswi_op, xfer);

		if (xfer->kind == kind && page >= op->page && page < op->page + op->pages)
			n++;
	}
	return n;
}

UNUSED_OK static uint64_t donor_value(const struct world *w, uint32_t remote, uint64_t page)
{
	return value_at(iswi_sim_of(w->e)->donors[remote]->memory + page * ISW_PAGE_BYTES);
}

UNUSED_OK static uint64_t disk_value(const struct world *w, uint64_t page)
{
	return value_at(iswi_sim_of(w->e)->disk + page * ISW_PAGE_BYTES);
}

/* --------------------------------------------------------------------- requests */

static inline uint32_t submit(struct world *w, uint32_t op, uint64_t page, uint64_t pages,
			      uint64_t value)
{
	static _Alignas(8) unsigned char data[REQUEST_PAGES_MAX * ISW_PAGE_BYTES];
	uint64_t id = 0;

	for (uint64_t i = 0; (op & 0xff) == ISW_SIM_WRITE && i < pages; i++)
		for (uint32_t k = 0; k < ISW_PAGE_BYTES / 8; k++)
			((uint64_t *)(data + i * ISW_PAGE_BYTES))[k] = value + i;
	CHECK_EQ(isw_sim_submit(w->e, op, page * ISW_PAGE_BYTES, pages * ISW_PAGE_BYTES, data, &id),
		 0);
	reap(w);
	return (uint32_t)id;
}

/* Page i of the write holds value + i. */
UNUSED_OK static uint32_t put(struct world *w, uint64_t page, uint64_t pages, uint64_t value)
{
	return submit(w, ISW_SIM_WRITE, page, pages, value);
}

UNUSED_OK static uint32_t get(struct world *w, uint64_t page, uint64_t pages)
{
	return submit(w, ISW_SIM_READ, page, pages, 0);
}

UNUSED_OK static uint32_t trim(struct world *w, uint64_t page, uint64_t pages)
{
	return submit(w, ISW_SIM_TRIM, page, pages, 0);
}

UNUSED_OK static uint32_t flush(struct world *w)
{
	return submit(w, ISW_SIM_FLUSH, 0, 0, 0);
}

/* ------------------------------------------------------------------------ steps */

static inline int step(struct world *w, uint32_t kind, uint32_t r, uint32_t n)
{
	int done = isw_engine_step(w->e, kind, r, n);

	CHECK(done >= 0);
	reap(w);
	return done;
}

#define REPLY(w, r, n)    CHECK_EQ(step(w, ISW_STEP_REMOTE_REPLY, r, n), 1)
#define APPLY(w, r, n)    CHECK_EQ(step(w, ISW_STEP_REMOTE_APPLY, r, n), 1)
#define REFUSE(w, r, n)   CHECK_EQ(step(w, ISW_STEP_REMOTE_FAIL, r, n), 1)
#define SLOW(w, r, n)     CHECK_EQ(step(w, ISW_STEP_REMOTE_SLOW, r, n), 1)
#define CORRUPT(w, r, n)  CHECK_EQ(step(w, ISW_STEP_REMOTE_CORRUPT, r, n), 1)
#define BREAK(w, r)       CHECK_EQ(step(w, ISW_STEP_REMOTE_DOWN, r, 0), 1)
#define DISK_TAKE(w)      CHECK_EQ(step(w, ISW_STEP_BACKUP_TAKE, 0, 0), 1)
#define DISK_NOTHING(w)   CHECK_EQ(step(w, ISW_STEP_BACKUP_TAKE, 0, 0), 0)
#define DISK_TAKE_READ(w) CHECK_EQ(step(w, ISW_STEP_BACKUP_TAKE, 1, 0), 1)
#define DISK_DONE(w, n)   CHECK_EQ(step(w, ISW_STEP_BACKUP_DONE, 0, n), 1)
#define DISK_FAIL(w, n)   CHECK_EQ(step(w, ISW_STEP_BACKUP_FAIL, 0, n), 1)
/* The next job of a writer, or a reader, from its beginning to its end, which is the first. */
#define DISK_WRITE(w)                                                                              \
	do {                                                                                       \
		DISK_TAKE(w);                                                                      \
		DISK_DONE(w, 0);                                                                   \
	} while (0)
#define DISK_READ(w)                                                                               \
	do {                                                                                       \
		DISK_TAKE_READ(w);                                                                 \
		DISK_DONE(w, 0);                                                                   \
	} while (0)
#define DISK_REFUSE(w)                                                                             \
	do {                                                                                       \
		DISK_TAKE(w);                                                                      \
		DISK_FAIL(w, 0);                                                                   \
	} while (0)
/* A read of one page, or the first of several, that is done. */
#define GOT(w, id, value)                                                                          \
	do {                                                                                       \
		uint32_t id_ = (id);                                                               \
                                                                                                   \
		CHECK_EQ((w)->error[id_], 0);                                                      \
		CHECK_EQ((w)->got[id_][0], value);                                                 \
	} while (0)
/* What has become of each of these requests. */
#define CAME_TO(w, code, ...)                                                                      \
	do {                                                                                       \
		const uint32_t ids_[] = {__VA_ARGS__};                                             \
                                                                                                   \
		for (uint32_t i_ = 0; i_ < ISWI_ARRAY_LEN(ids_); i_++)                             \
			CHECK_EQ((w)->error[ids_[i_]], code);                                      \
	} while (0)

UNUSED_OK static void remotes_settle(struct world *w)
{
	for (uint32_t r = 0; r < ISWI_SIM_REMOTES; r++)
		while (iswi_sim_of(w->e)->donors[r] && step(w, ISW_STEP_REMOTE_REPLY, r, 0))
			;
}

UNUSED_OK static void disk_settle(struct world *w)
{
	while (step(w, ISW_STEP_BACKUP_TAKE, 0, 0) || step(w, ISW_STEP_BACKUP_TAKE, 1, 0) ||
	       step(w, ISW_STEP_BACKUP_DONE, 0, 0))
		;
}

/* Everything ends, without faults; more than once, because one end starts another thing. */
UNUSED_OK static void settle(struct world *w)
{
	for (int i = 0; i < 100; i++) {
		step(w, ISW_STEP_UNPLUG, 0, 0);
		remotes_settle(w);
		disk_settle(w);
	}
	step(w, ISW_STEP_BACKUP_RETRY, 0, 0);
	remotes_settle(w);
	disk_settle(w);
}

/* Everything ends, these requests without an error, ... */
#define END_WELL(w, ...)                                                                           \
	do {                                                                                       \
		settle(w);                                                                         \
		CAME_TO(w, 0, __VA_ARGS__);                                                        \
	} while (0)
/* ... or this read with that value. */
#define READ_ENDS(w, id, value)                                                                    \
	do {                                                                                       \
		settle(w);                                                                         \
		GOT(w, id, value);                                                                 \
	} while (0)

UNUSED_OK static void write_settled(struct world *w, uint64_t page, uint64_t pages, uint64_t value)
{
	uint32_t id = put(w, page, pages, value);

	END_WELL(w, id);
}

/* The page's value, or the error, negative. */
UNUSED_OK static int64_t read_settled(struct world *w, uint64_t page)
{
	uint32_t id = get(w, page, 1);

	settle(w);
	CHECK(w->error[id] != PENDING);
	return w->error[id] ? w->error[id] : (int64_t)w->got[id][0];
}

/* Every page came from exactly one place. */
UNUSED_OK static void sources_are(const struct world *w, uint64_t remote, uint64_t backup,
				  uint64_t staging)
{
	const struct isw_engine_stats stats = stats_of(w);

	CHECK_EQ(stats.pages_in_remote, remote);
	CHECK_EQ(stats.pages_in_backup, backup);
	CHECK_EQ(stats.pages_in_staging, staging);
	CHECK_EQ(stats.pages_in, remote + backup + staging + stats.pages_in_zero);
	CHECK_EQ(stats.fallback_slow + stats.fallback_error + stats.fallback_suspended +
			 stats.fallback_invalid + stats.fallback_unmapped + stats.fallback_quicker +
			 stats.fallback_measured,
		 backup);
}

/* It is not even asked of donor 0. */
UNUSED_OK static void read_elsewhere(struct world *w, uint64_t page, uint64_t value)
{
	uint32_t id = get(w, page, 1);

	CHECK_EQ(sent(w, 0), 0);
	READ_ENDS(w, id, value);
}

/* The page's value comes from there: remote, backup, staging or zero. */
#define READ_FROM(w, source, page, value)                                                          \
	do {                                                                                       \
		uint64_t before_ = stats_of(w).pages_in_##source;                                  \
                                                                                                   \
		CHECK_EQ(read_settled(w, page), value);                                            \
		CHECK_EQ(stats_of(w).pages_in_##source, before_ + 1);                              \
	} while (0)

/* ---------------------------------------------------------------------- control */

UNUSED_OK static uint32_t remote_new(struct world *w)
{
	uint32_t remote;

	CHECK_EQ(isw_sim_remote(w->e, 2, SLABS, &remote), 0);
	return remote;
}

/* The slot's number is the slab's, so that a page is at the same place everywhere. */
UNUSED_OK static uint64_t map(struct world *w, uint32_t slab, uint32_t remote)
{
	CHECK_EQ(isw_slab_map(w->e, slab, remote, slab, ++w->generations), 0);
	return w->generations;
}

UNUSED_OK static void reconnect(struct world *w, uint32_t remote)
{
	CHECK_EQ(isw_sim_remote_reconnect(w->e, remote), 0);
}

UNUSED_OK static void resume(struct world *w, uint32_t slab)
{
	CHECK_EQ(isw_slab_resume(w->e, slab, slab_of(w, slab).remote, slab_of(w, slab).generation),
		 0);
}

/* A donor that broke is there again, and so is slab 0. */
UNUSED_OK static void donor_returns(struct world *w, uint32_t remote)
{
	reconnect(w, remote);
	resume(w, 0);
}

/* Slab 0's current place is given up. */
UNUSED_OK static void unmap(struct world *w)
{
	CHECK_EQ(isw_slab_unmap(w->e, 0, slab_of(w, 0).remote, slab_of(w, 0).generation), 0);
	reap(w);
}

/* Copies from the backup to slab 0's donor, page *next and on; returns how many have begun. */
UNUSED_OK static int fill_on(struct world *w, uint32_t *next, uint32_t pages_max)
{
	return isw_slab_fill(w->e, 0, slab_of(w, 0).generation, *next, pages_max, next);
}

/* So many begin; returns where others would. */
UNUSED_OK static uint32_t fill(struct world *w, uint32_t next, uint32_t pages_max, int begun)
{
	CHECK_EQ(fill_on(w, &next, pages_max), begun);
	return next;
}

/* A world with slab 0 on a donor, number 0. */
UNUSED_OK static struct world *world_mapped(uint32_t flags)
{
	struct world *w = world_new(flags);

	CHECK_EQ(remote_new(w), 0);
	map(w, 0, 0);
	return w;
}

/* With some pages there, and on the backup if it has one; page i of them holds value + i. */
UNUSED_OK static struct world *world_holding(uint32_t flags, uint64_t page, uint64_t pages,
					     uint64_t value)
{
	struct world *w = world_mapped(flags);

	write_settled(w, page, pages, value);
	for (uint64_t i = page; i < page + pages; i++)
		CHECK(is_remote_valid(w, i) && is_backup_current(w, i) == w->e->has_backup);
	return w;
}

/* At the end nothing may be left over: no request, no buffer, no entry, no transfer. */
UNUSED_OK static void world_end(struct world *w)
{
	struct isw_engine_stats stats;
	uint64_t entries = 0, ops = 0, wanted;

	if (w->successor)
		world_end(w->successor);
	settle(w);
	stats = stats_of(w);
	CHECK_EQ(stats.requests_in_flight, 0);
	CHECK_EQ(stats.staging_pages_used, 0);
	CHECK_EQ(w->e->staging_alloc.copies, 0);
	CHECK_EQ(w->e->staging_alloc.far, 0);
	for (uint32_t i = 0; i < w->e->slabs_count; i++)
		CHECK_EQ(slab_of(w, i).in_flight + slab_of(w, i).source_in_flight, 0);
	for (uint32_t i = w->e->entries_free; i != ISWI_NONE; i = w->e->entries[i].hash_next)
		entries++;
	CHECK_EQ(entries, w->e->config.staging_pages);
	for (const struct iswi_op *op = w->e->ops_free; op; op = op->next)
		ops++;
	wanted = w->e->config.staging_pages + (uint64_t)w->e->config.requests_max *
						      w->e->config.request_bytes_max /
						      ISW_PAGE_BYTES;
	if (w->e->config.far_bytes)
		wanted += ISWI_FAR_READS_MAX * (ISWI_FAR_REQUEST_BYTES_MAX / ISW_PAGE_BYTES);
	for (uint32_t i = 0; w->e->ahead && i < ISWI_AHEAD_GROUPS; i++, wanted++)
		CHECK(!w->e->ahead->groups[i].taken && !w->e->ahead->groups[i].waits_count);
	CHECK_EQ(w->e->pairs_free, iswi_hedges(w->e) ? ISWI_PAIRS_ALL : 0);
	CHECK_EQ(w->e->bare_free, iswi_hedges(w->e) ? ISWI_BARE : 0);
	wanted += iswi_hedges(w->e) ? 2 * (ISWI_PAIRS + ISWI_BARE) : 0;
	CHECK_EQ(ops, wanted);
	isw_engine_destroy(w->e);
	free(w);
}

/* A connection of our own: it keeps what it is given, and is silent. A world has one at most. */
static struct quiet {
	struct iswi_queue base;
	struct iswi_xfer *got;
	const struct world *w;
	uint32_t source_state; /* of slab 0, when it was given that */
} quiet;

static inline void quiet_submit(struct iswi_queue *queue, struct iswi_xfer *first)
{
	(void)queue;
	quiet.got = first;
	quiet.source_state = slab_of(quiet.w, 0).source_state;
}

static inline void quiet_ignore(struct iswi_queue *queue)
{
	(void)queue;
}

/* It is all that a remote which is being changed has from now on. */
UNUSED_OK static void connect_quiet(const struct world *w, uint32_t remote)
{
	static const struct iswi_transport_ops ops = {
		.name = "quiet",
		.submit = quiet_submit,
		.shutdown = quiet_ignore,
		.destroy = quiet_ignore,
	};
	struct iswi_queue *queues[] = {&quiet.base};

	quiet = (struct quiet){.base.ops = &ops, .w = w};
	iswi_remote_set(w->e, remote, queues, 1, ISWI_REMOTE_UP);
}

UNUSED_OK static uint32_t quiet_remote(const struct world *w)
{
	uint32_t remote = ISW_NO_REMOTE;

	CHECK_EQ(iswi_remote_reserve(w->e, &remote), 0);
	connect_quiet(w, remote);
	return remote;
}

/* A test, or one case of several, in a world that is made for it and ended after it. */
#define WORLD_CASES(name, count, n, make)                                                          \
	static void name##_in(struct world *w, uint32_t n);                                        \
	TEST_CASES(name, count, n)                                                                 \
	{                                                                                          \
		struct world *w = make;                                                            \
                                                                                                   \
		name##_in(w, n);                                                                   \
		world_end(w);                                                                      \
	}                                                                                          \
	static void name##_in(struct world *w, UNUSED_OK uint32_t n)
#define WORLD_TEST(name, make) WORLD_CASES(name, 1, only, make)

#endif
