/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every transport must stand: the threaded engine, with its real backup file, a transport and
 * donor stores, all in this process: several threads read, write and zero verified pages, while a
 * control thread maps, migrates, unmaps, breaks, renews and resumes whatever it can. Every byte
 * must be right at every moment.
 * A second run has a backup in memory and the fewest staging buffers: the disk's pace hides races.
 */
#ifndef ISW_TEST_ENGINE_THREADS_H
#define ISW_TEST_ENGINE_THREADS_H

#include <unistd.h>

#include "engine/backup/backup.h"
#include "engine/remote/remote.h"
#include "engine_workers.h"
#include "verbs/verbs.h"

#define SLAB_PAGES 64u
#define SLABS      16u
#define PAGES      (SLAB_PAGES * SLABS - 5u)
#define DONORS     2u
#define QUEUES     2u
#define PLACES     100000u /* mappings in one run, far more than there are */

/* How pages reach the donors: NULL: TCP; else RDMA, from and to this address. */
static const struct iswi_verbs *verbs;
static const char *host = "127.0.0.1";

struct donor {
	isw_store *store;
	uint64_t lease;
	uint32_t remote;
	uint16_t port;
	bool down;
};

/* A mapping's slot; its number in the table is the engine's generation. Control thread only. */
struct place {
	uint32_t donor, slot;
	uint64_t generation;
};

struct world {
	isw_engine *engine;
	struct donor donors[DONORS];
	struct place places[PLACES];
	uint64_t control_random;
	uint32_t mappings, maps, migrations, moves, unmaps, breaks, resumes;
};

/* ---------------------------------------------------- what Python and a daemon do */

static struct isw_slab_info slab_of(struct world *w, uint32_t slab)
{
	struct isw_slab_info info;

	CHECK_EQ(isw_engine_slabs(w->engine, slab, 1, &info), 1);
	return info;
}

static struct isw_remote_config remote_config(const struct donor *d, const char *ticket)
{
	return donor_config(host, d->port, ticket, QUEUES, SLABS * SLAB_PAGES * ISW_PAGE_BYTES);
}

/* What goes over the control session: each end tells the other of its own. */
static void exchange(struct world *w, struct donor *d, struct isw_remote_config *remote,
		     struct isw_rdma_end *peers)
{
	struct isw_rdma_end ends[QUEUES];
	struct isw_error error = {0};

	if (verbs == NULL)
		return;
	CHECK_OK(isw_rdma_offer_make(w->engine, host, QUEUES, SLABS, &remote->rdma, &error), error);
	for (uint32_t i = 0; i < QUEUES; i++)
		isw_rdma_offer_end(remote->rdma, i, &ends[i]);
	CHECK_OK(isw_store_rdma_open(d->store, d->lease, ends, QUEUES, peers, &remote->rdma_probe,
				     &error),
		 error);
	remote->rdma_peers = peers;
}

/* False: there is no connection that could use the slot. */
static bool tell_key(struct world *w, struct donor *d, uint32_t slot, uint64_t generation)
{
	struct isw_error error = {0};
	struct isw_rdma_key key;
	int code;

	if (verbs == NULL)
		return true;
	code = isw_store_rdma_key(d->store, d->lease, slot, generation, 0, &key, &error);
	if (code == -ENOTCONN) /* renewed from the donor's side: the engine will hear of it */
		return false;
	CHECK_EQ(code, 0);
	code = isw_remote_slot_key(w->engine, d->remote, slot, &key);
	CHECK(code == 0 || code == -ENOTCONN);
	return code == 0;
}

static void donor_start(struct world *w, struct donor *d)
{
	char ticket[ISW_TICKET_TEXT_BYTES];
	struct isw_rdma_end peers[QUEUES];
	struct isw_remote_config remote;
	struct isw_error error = {0};

	d->store = donor_store(host, SLAB_PAGES * ISW_PAGE_BYTES, SLABS, SLABS * 3 / 4, &d->port);
	if (verbs != NULL)
		iswi_store_verbs_set(d->store, verbs);
	CHECK_EQ(lease_create(d->store, SLABS, ticket, &d->lease, &error), 0);
	remote = remote_config(d, ticket);
	exchange(w, d, &remote, peers);
	CHECK_EQ(isw_remote_connect(w->engine, &remote, &d->remote, &error), 0);
}

static void tell_place(struct world *w, struct donor *d, uint64_t mapping)
{
	(void)tell_key(w, d, w->places[mapping].slot, w->places[mapping].generation);
}

/* To a donor; a slab that is somewhere already, to one more. */
static void map_slab(struct world *w, uint32_t slab, bool migrate)
{
	uint32_t number = below(&w->control_random, DONORS);
	struct donor *d = &w->donors[number];
	struct place *place = &w->places[w->mappings];
	int code = -ENOTCONN;

	CHECK(w->mappings < PLACES);
	if (isw_store_map(d->store, d->lease, 0, &place->slot, &place->generation))
		return; /* full */
	place->donor = number;
	/* As a device does, which maps nothing without its key. */
	if (tell_key(w, d, place->slot, place->generation))
		code = migrate ? isw_slab_migrate(w->engine, slab, d->remote, place->slot,
						  w->mappings++)
			       : isw_slab_map(w->engine, slab, d->remote, place->slot,
					      w->mappings++);
	CHECK(code == 0 || code == -ENOTCONN);
	w->maps += !code && !migrate;
	w->migrations += !code && migrate;
	if (!code)
		return;
	CHECK_EQ(isw_store_unmap(d->store, d->lease, place->slot, place->generation, 0), 0);
	CHECK_EQ(isw_store_scrub(d->store), 0);
}

static void fill_slab(struct world *w, uint32_t slab, uint64_t generation)
{
	uint32_t next;
	int begun = isw_slab_fill(w->engine, slab, generation,
				  below(&w->control_random, SLAB_PAGES), SLAB_PAGES, &next);

	CHECK(begun >= 0 || begun == -ESTALE);
}

/* Whatever is still there is left to the backup. */
static void leave_source(struct world *w, uint32_t slab)
{
	struct isw_slab_info info = slab_of(w, slab);

	if (info.source_state == ISW_SLAB_MAPPED || info.source_state == ISW_SLAB_SUSPENDED)
		CHECK_EQ(
			isw_slab_unmap(w->engine, slab, info.source_remote, info.source_generation),
			0);
}

/* Goes on with a migration: pulls what is left, leaves the source when nothing is, or before. */
static void move_slab(struct world *w, uint32_t slab)
{
	struct isw_slab_info info = slab_of(w, slab);
	uint32_t pages;
	int code;

	if (info.source_state != ISW_SLAB_MAPPED && info.source_state != ISW_SLAB_SUSPENDED)
		return;
	code = isw_slab_pull(w->engine, slab, info.generation, below(&w->control_random, 2));
	CHECK(code >= 0 || code == -ESTALE);
	code = isw_slab_pages_at(w->engine, slab, info.source_remote, info.source_generation,
				 &pages);
	CHECK(code >= 0 && pages <= SLAB_PAGES);
	if (code == 0 && pages == 0)
		w->moves++;
	else if (below(&w->control_random, 8))
		return;
	leave_source(w, slab);
}

/* DONE: only now the donor may have its memory back. */
static void slab_drained(struct world *w, const struct isw_event *event)
{
	struct place *place = &w->places[event->generation];
	struct donor *d = &w->donors[place->donor];

	/* A later mapping of the same slab may be there already. */
	CHECK_EQ(isw_store_unmap(d->store, d->lease, place->slot, place->generation, WAIT_MS), 0);
	CHECK_EQ(isw_store_scrub(d->store), 0);
	w->unmaps++;
}

static void come_back(struct world *w, struct donor *d)
{
	char ticket[ISW_TICKET_TEXT_BYTES];
	struct isw_rdma_end peers[QUEUES];
	struct isw_remote_config remote;
	struct isw_error error = {0};
	int code;

	CHECK_EQ(lease_renew(d->store, d->lease, WAIT_MS, ticket), 0);
	remote = remote_config(d, ticket);
	exchange(w, d, &remote, peers);
	CHECK_OK(isw_remote_reconnect(w->engine, d->remote, &remote, &error), error);
	d->down = false;
	for (uint32_t i = 0; i < SLABS; i++) {
		struct isw_slab_info info = slab_of(w, i);

		if (info.state != ISW_SLAB_UNMAPPED && info.remote == d->remote)
			tell_place(w, d, info.generation);
		if (info.source_state != ISW_SLAB_UNMAPPED && info.source_remote == d->remote)
			tell_place(w, d, info.source_generation);
		if (info.source_state == ISW_SLAB_SUSPENDED && info.source_remote == d->remote) {
			code = isw_slab_resume(w->engine, i, info.source_remote,
					       info.source_generation);
			CHECK(code == 0 || code == -ENOTCONN);
		}
		if (info.state != ISW_SLAB_SUSPENDED || info.remote != d->remote)
			continue;
		if (!below(&w->control_random, 4)) {
			CHECK_EQ(isw_slab_unmap(w->engine, i, info.remote, info.generation), 0);
			continue;
		}
		code = isw_slab_resume(w->engine, i, info.remote, info.generation);
		CHECK(code == 0 || code == -ENOTCONN);
		w->resumes += !code;
	}
}

static void take_events(struct world *w)
{
	struct isw_event event;

	while (isw_engine_events(w->engine, &event, 1)) {
		if (event.kind == ISW_EVENT_SLAB_DRAINED)
			slab_drained(w, &event);
		for (uint32_t i = 0; event.kind == ISW_EVENT_REMOTE_DOWN && i < DONORS; i++)
			if (w->donors[i].remote == event.remote)
				w->donors[i].down = true;
		/* A slab's own refusals, garbage, or a failing disk have no place here. */
		CHECK(event.kind != ISW_EVENT_SLAB_ERROR && event.kind != ISW_EVENT_BAD_PAGE &&
		      event.kind != ISW_EVENT_BACKUP_FAILING && event.kind != ISW_EVENT_OVERFLOW);
	}
}

static void break_donor(struct world *w, struct donor *d)
{
	char ticket[ISW_TICKET_TEXT_BYTES];

	if (d->down)
		return;
	w->breaks++;
	if (below(&w->control_random, 2))
		CHECK_EQ(isw_remote_shutdown(w->engine, d->remote), 0);
	else /* from the donor's side: both ends notice at their own time */
		CHECK_EQ(lease_renew(d->store, d->lease, WAIT_MS, ticket), 0);
}

static void control(struct world *w)
{
	uint32_t slab = below(&w->control_random, SLABS), what = below(&w->control_random, 40);
	struct isw_slab_info info = slab_of(w, slab);
	struct isw_remote_info remotes[DONORS];
	struct isw_engine_stats stats;

	if (info.state == ISW_SLAB_UNMAPPED && what < 30)
		map_slab(w, slab, false);
	else if (info.state == ISW_SLAB_MAPPED && info.source_state == ISW_SLAB_UNMAPPED &&
		 what >= 8 && what < 24)
		map_slab(w, slab, true);
	else if (info.state == ISW_SLAB_MAPPED && what < 8)
		CHECK_EQ(isw_slab_unmap(w->engine, slab, info.remote, info.generation), 0);
	else if (what == 39)
		break_donor(w, &w->donors[below(&w->control_random, DONORS)]);
	fill_slab(w, slab, slab_of(w, slab).generation);
	for (uint32_t i = 0; i < SLABS; i++)
		if (!below(&w->control_random, 3))
			move_slab(w, i);
	for (uint32_t i = 0; i < DONORS; i++)
		if (w->donors[i].down && what > 30)
			come_back(w, &w->donors[i]);
	take_events(w);
	CHECK_EQ(isw_engine_remotes(w->engine, DONORS, remotes), DONORS);
	isw_engine_stats(w->engine, &stats);
	CHECK(stats.requests_in_flight <= WORKERS * DEPTH);
	pause_ms(1 + below(&w->control_random, 3));
}

/* ------------------------------------------------------------- a backup in memory */

/* A read may meet a write of the same page, as on a disk; the lock is a sector's atomicity. */
struct memory {
	pthread_mutex_t lock;
	char bytes[PAGES * ISW_PAGE_BYTES];
};

static void memory_copy(struct memory *memory, void *to, const void *from)
{
	pthread_mutex_lock(&memory->lock);
	memcpy(to, from, ISW_PAGE_BYTES);
	pthread_mutex_unlock(&memory->lock);
}

static int memory_write(void *ctx, const struct iovec *iov, int iov_count, uint64_t offset)
{
	struct memory *memory = ctx;

	for (int i = 0; i < iov_count; i++) {
		CHECK_EQ(iov[i].iov_len, ISW_PAGE_BYTES);
		memory_copy(memory, memory->bytes + offset, iov[i].iov_base);
		offset += ISW_PAGE_BYTES;
	}
	return 0;
}

static int memory_read(void *ctx, void *buf, uint32_t bytes, uint64_t offset)
{
	struct memory *memory = ctx;

	for (uint32_t i = 0; i < bytes; i += ISW_PAGE_BYTES)
		memory_copy(memory, (char *)buf + i, memory->bytes + offset + i);
	return 0;
}

static int memory_sync(void *ctx)
{
	(void)ctx;
	return 0;
}

static void memory_destroy(void *ctx)
{
	struct memory *memory = ctx;

	pthread_mutex_destroy(&memory->lock);
	free(memory);
}

static const struct iswi_backup_ops memory_ops = {"memory", memory_write, memory_read, memory_sync,
						  memory_destroy};

/* ------------------------------------------------------------------------- runs */

static void engine_start(struct world *w, uint32_t staging)
{
	const struct isw_engine_config config = {
		.size_bytes = PAGES * ISW_PAGE_BYTES,
		.slab_bytes = SLAB_PAGES * ISW_PAGE_BYTES,
		.staging_pages = staging,
		.request_bytes_max = RUN_PAGES * ISW_PAGE_BYTES,
		.requests_max = WORKERS * DEPTH,
		.remotes_max = DONORS,
		.state_fd = -1,
		.backup_write_bytes_max = 32 * ISW_PAGE_BYTES,
		.backup_writers = 2,
		.backup_readers = 2,
		.hedge_us_min = 1, /* whatever takes more than four times the tail */
		.flags = ISW_ENGINE_READ_AHEAD | ISW_ENGINE_QUICKER,
	};

	w->engine = engine_with_backup(&config, "threads");
}

/* Before the first request: the threads look at the backup only when there is work. */
static void use_memory(isw_engine *e)
{
	struct memory *memory = calloc(1, sizeof(*memory));

	CHECK(memory);
	pthread_mutex_init(&memory->lock, NULL);
	e->backup->ops->destroy(e->backup->ctx);
	e->backup->ctx = memory;
	e->backup->ops = &memory_ops;
}

static void *end_stores(void *arg)
{
	struct world *w = arg;

	for (uint32_t i = 0; i < DONORS; i++)
		isw_store_destroy(w->donors[i].store);
	return NULL;
}

/* Settling does not wait for copies. Those of a slab without a source begin no other ones. */
static void end_copies(struct world *w)
{
	struct isw_engine_stats stats;
	uint32_t sources;

	for (uint32_t i = 0;; i++) {
		sources = 0;
		for (uint32_t slab = 0; slab < SLABS; slab++) {
			leave_source(w, slab);
			sources += slab_of(w, slab).source_state != ISW_SLAB_UNMAPPED;
		}
		isw_engine_stats(w->engine, &stats);
		if (!sources &&
		    stats.pages_copied + stats.pages_migrated + stats.pages_copy_dropped ==
			    iswi_counted(&w->engine->count.copies_begun))
			return;
		CHECK(i < WAIT_MS);
		pause_ms(1);
	}
}

/* Whether everything has happened that a run is for. */
static bool is_full(const struct world *w)
{
	struct isw_engine_stats stats;

	isw_engine_stats(w->engine, &stats);
	return stats.pages_in_remote && stats.pages_in_backup && stats.pages_in_staging &&
	       stats.pages_ahead_used && stats.staging_waits && w->maps && w->unmaps && w->breaks &&
	       w->resumes && w->migrations;
}

static uint64_t pages_migrated; /* by all runs */

static void check_end(struct world *w, struct crowd *crowd)
{
	struct isw_engine_stats stats;
	uint64_t checked;

	CHECK_EQ(isw_engine_settle(w->engine, WAIT_MS), 0);
	end_copies(w);
	CHECK_EQ(isw_engine_settle(w->engine, 0), 0);
	/* Every donor gone: all that is left is the backup, and it is enough. */
	for (uint32_t i = 0; i < DONORS; i++)
		CHECK_EQ(isw_remote_shutdown(w->engine, w->donors[i].remote), 0);
	checked = crowd_check(crowd);
	isw_engine_stats(w->engine, &stats);
	printf("%llu pages checked: %llu from donors, %llu staged, %llu from the backup; "
	       "%llu waits; %u maps, %u migrations, %u of them complete, %u unmaps, %u breaks, "
	       "%u resumes; %llu copied, %llu migrated, %llu dropped; "
	       "%llu hedged, %llu by the backup; %llu read ahead, %llu used\n",
	       (unsigned long long)checked, (unsigned long long)stats.pages_in_remote,
	       (unsigned long long)stats.pages_in_staging,
	       (unsigned long long)stats.pages_in_backup, (unsigned long long)stats.staging_waits,
	       w->maps, w->migrations, w->moves, w->unmaps, w->breaks, w->resumes,
	       (unsigned long long)stats.pages_copied, (unsigned long long)stats.pages_migrated,
	       (unsigned long long)stats.pages_copy_dropped, (unsigned long long)stats.hedged_reads,
	       (unsigned long long)stats.hedged_wins, (unsigned long long)stats.pages_ahead,
	       (unsigned long long)stats.pages_ahead_used);
	CHECK_EQ(stats.requests_failed, 0);
	CHECK_EQ(stats.requests_in_flight, 0);
	CHECK_EQ(stats.staging_pages_used, 0);
	CHECK_EQ(stats.crc_errors_remote, 0); /* no rule may lean on the checksums */
	CHECK_EQ(stats.crc_errors_backup, 0);
	CHECK_EQ(stats.backup_errors, 0);
	/* The run was what it is meant to be. */
	CHECK(is_full(w));
	pages_migrated += stats.pages_migrated;
}

/* Longer, up to a minute, where others have the processors. */
static void run(uint32_t run_ms, uint64_t seed, bool in_memory)
{
	static struct world world;
	static struct crowd crowd;
	struct world *w = &world;
	uint64_t end_ns = iswi_now_ns() + run_ms * 1000000ull;
	uint64_t last_ns = end_ns + 60000000000ull;
	pthread_t ender;

	memset(w, 0, sizeof(*w));
	w->control_random = seed;
	engine_start(w, in_memory ? 16 : 48);
	if (in_memory)
		use_memory(w->engine);
	if (verbs != NULL)
		iswi_engine_verbs_set(w->engine, verbs);
	for (uint32_t i = 0; i < DONORS; i++)
		donor_start(w, &w->donors[i]);
	crowd_start(&crowd, w->engine, seed, PAGES, true);
	while (iswi_now_ns() < end_ns || (!is_full(w) && iswi_now_ns() < last_ns))
		control(w);
	crowd_stop(&crowd);
	take_events(w);
	for (uint32_t i = 0; i < DONORS; i++)
		if (w->donors[i].down)
			come_back(w, &w->donors[i]);
	check_end(w, &crowd);
	/* Both ends are taken down at once, in the middle of copies. */
	for (uint32_t i = 0; i < DONORS; i++)
		come_back(w, &w->donors[i]);
	take_events(w);
	for (uint32_t i = 0; i < SLABS; i++) {
		if (slab_of(w, i).state == ISW_SLAB_UNMAPPED)
			map_slab(w, i, false);
		fill_slab(w, i, slab_of(w, i).generation);
		if (slab_of(w, i).state == ISW_SLAB_MAPPED) {
			map_slab(w, i, true);
			move_slab(w, i);
		}
	}
	CHECK_EQ(iswi_thread_start(&ender, "ender", end_stores, w), 0);
	isw_engine_destroy(w->engine);
	pthread_join(ender, NULL);
	crowd_free(&crowd);
}

/* 1.5 seconds of each unless argv says more. */
static int conform(int argc, char **argv)
{
	uint32_t run_ms = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 1500;
	uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : iswi_now_ns() | 1;

	printf("seed %llu\n", (unsigned long long)seed);
	fflush(stdout);
	run(run_ms, seed, false);
	run(run_ms, seed, true);
	/* A slow disk may keep every page staged for as long as its slab migrates. */
	for (uint32_t i = 1; !pages_migrated && i < 20; i++)
		run(run_ms, seed + i, true);
	CHECK(pages_migrated);
	return 0;
}

#endif
