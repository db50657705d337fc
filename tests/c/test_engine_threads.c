/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threaded engine, with its real backup file, TCP transport and donor stores, all in this
 * process: several threads read, write and zero verified pages, while a control thread maps,
 * unmaps, breaks, renews and resumes whatever it can. Every byte must be right at every moment.
 *
 *     test_engine_threads [MILLISECONDS [SEED]]
 */
#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "engine/request.h"
#include "util/util.h"

#define SLAB_PAGES   64u
#define SLABS        16u
#define PAGES        (SLAB_PAGES * SLABS - 5u)
#define STAGING      96u /* few: writes wait for buffers much of the time */
#define DONORS       2u
#define WORKERS      4u
#define SHARED_PAGES 64u /* the first ones, written by all; the rest is divided */
#define DEPTH        6u
#define RUN_PAGES    8u
#define WAIT_MS      20000u
#define PLACES       100000u /* mappings in one run, far more than there are */

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
	uint32_t mappings, maps, unmaps, breaks, resumes;
	atomic_bool stop; /* relaxed: joining orders the rest */
	/* Newest value of a shared page whose write each worker has seen complete; relaxed. */
	atomic_uint_fast64_t completed[WORKERS][SHARED_PAGES];
};

/* One of a worker's requests. */
struct slot {
	struct iswi_req req;
	struct worker *worker;
	bool busy, ended;
	int error;
	uint64_t floor[WORKERS][RUN_PAGES]; /* shared reads: what was complete before */
	unsigned char *data;
};

struct worker {
	struct world *world;
	uint32_t number;
	uint64_t random, values, checked;
	pthread_t thread;
	pthread_mutex_t lock; /* ended */
	pthread_cond_t cond;
	struct slot slots[DEPTH];
	uint64_t *expected;  /* own pages: what was written last */
	bool *page_busy;     /* own pages: part of a request in flight */
	uint64_t first, end; /* own pages */
};

static uint64_t draw(uint64_t *random) /* xorshift64* */
{
	*random ^= *random >> 12;
	*random ^= *random << 25;
	*random ^= *random >> 27;
	return *random * 2685821657736338717ull;
}

static uint32_t below(uint64_t *random, uint32_t limit)
{
	return (uint32_t)((draw(random) >> 33) % limit);
}

static void pause_ms(uint32_t ms)
{
	const struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};

	nanosleep(&time, NULL);
}

/* ---------------------------------------------------------------------- workers */

/* Who wrote it, where, and the how manieth of his it is. 0 is zeros. */
static uint64_t make_value(struct worker *w, uint64_t page)
{
	return (w->number + 1ull) << 60 | page << 40 | ++w->values;
}

static uint64_t value_of(const unsigned char *data, uint64_t page)
{
	uint64_t value, word;

	memcpy(&value, data, sizeof(value));
	for (uint32_t i = 8; i < ISW_PAGE_BYTES; i += 8) {
		memcpy(&word, data + i, sizeof(word));
		CHECK_EQ(word, value); /* torn */
	}
	if (value)
		CHECK_EQ(value >> 40 & 0xfffff, page); /* foreign */
	return value;
}

static void request_done(struct iswi_req *req, int error)
{
	struct slot *slot = ISWI_CONTAINER(req, struct slot, req);
	struct worker *w = slot->worker;

	pthread_mutex_lock(&w->lock);
	slot->ended = true;
	slot->error = error;
	pthread_cond_signal(&w->cond);
	pthread_mutex_unlock(&w->lock);
}

static void check_page(struct worker *w, struct slot *slot, uint64_t page, uint32_t i)
{
	uint64_t value = value_of(slot->data + i * ISW_PAGE_BYTES, page);

	w->checked++;
	if (page >= SHARED_PAGES) {
		CHECK_EQ(value, w->expected[page]);
		return;
	}
	/* Anybody's, but nothing that its writer had replaced before the read began. */
	if (value)
		CHECK(value >= slot->floor[(value >> 60) - 1][i]);
}

static void finish(struct worker *w, struct slot *slot)
{
	uint64_t first = slot->req.offset / ISW_PAGE_BYTES;
	uint64_t pages = slot->req.length / ISW_PAGE_BYTES;

	CHECK_EQ(slot->error, 0);
	for (uint32_t i = 0; i < pages; i++) {
		uint64_t page = first + i;

		if (slot->req.op == ISWI_READ)
			check_page(w, slot, page, i);
		else if (page < SHARED_PAGES && slot->req.op == ISWI_WRITE)
			atomic_store_explicit(&w->world->completed[w->number][page],
					      w->expected[page], memory_order_relaxed);
		w->page_busy[page] = false;
	}
	slot->busy = false;
	slot->ended = false;
}

/* Takes in what has ended; waits for some slot to be free, or all of them. */
static struct slot *collect(struct worker *w, bool all)
{
	struct timespec until;

	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += WAIT_MS / 1000;
	pthread_mutex_lock(&w->lock);
	for (;;) {
		struct slot *free_slot = NULL;
		uint32_t busy = 0;

		for (uint32_t i = 0; i < DEPTH; i++) {
			if (w->slots[i].ended)
				finish(w, &w->slots[i]);
			if (w->slots[i].busy)
				busy++;
			else
				free_slot = &w->slots[i];
		}
		if (all ? !busy : free_slot != NULL) {
			pthread_mutex_unlock(&w->lock);
			return free_slot;
		}
		CHECK_EQ(pthread_cond_timedwait(&w->cond, &w->lock, &until), 0); /* hangs */
	}
}

static void fill(struct worker *w, struct slot *slot, uint64_t page, uint32_t i)
{
	uint64_t *words = (uint64_t *)(slot->data + i * ISW_PAGE_BYTES);

	w->expected[page] = make_value(w, page);
	for (uint32_t k = 0; k < ISW_PAGE_BYTES / 8; k++)
		words[k] = w->expected[page];
}

static void submit(struct worker *w, struct slot *slot, enum iswi_req_op op, uint64_t page,
		   uint32_t pages)
{
	slot->req = (struct iswi_req){.op = op, .data = slot->data, .done = request_done};
	slot->busy = true;
	if (op != ISWI_FLUSH) {
		slot->req.offset = page * ISW_PAGE_BYTES;
		slot->req.length = pages * ISW_PAGE_BYTES;
	}
	if (op == ISWI_WRITE && !below(&w->random, 300))
		slot->req.flags = ISWI_REQ_FUA;
	for (uint32_t i = 0; op != ISWI_FLUSH && i < pages; i++) {
		w->page_busy[page + i] = true;
		if (op == ISWI_WRITE)
			fill(w, slot, page + i, i);
		else if (op != ISWI_READ && page >= SHARED_PAGES)
			w->expected[page + i] = 0;
		for (uint32_t k = 0; page < SHARED_PAGES && k < WORKERS; k++)
			slot->floor[k][i] = atomic_load_explicit(&w->world->completed[k][page + i],
								 memory_order_relaxed);
	}
	iswi_engine_submit(w->world->engine, &slot->req);
}

static void random_request(struct worker *w, struct slot *slot)
{
	static const enum iswi_req_op ops[] = {ISWI_READ,  ISWI_READ,  ISWI_READ,  ISWI_READ,
					       ISWI_WRITE, ISWI_WRITE, ISWI_WRITE, ISWI_WRITE,
					       ISWI_WRITE, ISWI_TRIM,  ISWI_ZERO};
	bool shared = !below(&w->random, 6);
	uint64_t first = shared ? 0 : w->first, end = shared ? SHARED_PAGES : w->end, page;
	uint32_t pages = below(&w->random, 3) ? 1 : 1 + below(&w->random, RUN_PAGES);

	if (!below(&w->random, 1000)) {
		submit(w, slot, ISWI_FLUSH, 0, 0);
		return;
	}
	page = first + below(&w->random, (uint32_t)(end - first));
	pages = (uint32_t)ISWI_MIN(pages, end - page);
	for (uint32_t i = 0; i < pages; i++)
		if (w->page_busy[page + i])
			return;
	submit(w, slot, ops[below(&w->random, ISWI_ARRAY_LEN(ops))], page, pages);
}

static void read_all(struct worker *w, uint64_t first, uint64_t end)
{
	for (uint64_t page = first; page < end; page += RUN_PAGES)
		submit(w, collect(w, false), ISWI_READ, page,
		       (uint32_t)ISWI_MIN(RUN_PAGES, end - page));
	collect(w, true);
}

static void *work(void *arg)
{
	struct worker *w = arg;

	while (!atomic_load_explicit(&w->world->stop, memory_order_relaxed))
		random_request(w, collect(w, false));
	collect(w, true);
	read_all(w, w->first, w->end);
	return NULL;
}

static void worker_init(struct world *world, struct worker *w, uint32_t number, uint64_t seed)
{
	uint64_t own = (PAGES - SHARED_PAGES) / WORKERS;
	pthread_condattr_t attr;

	*w = (struct worker){.world = world, .number = number, .random = seed * 77 + number + 1};
	w->first = SHARED_PAGES + number * own;
	w->end = w->first + own;
	w->expected = calloc(PAGES, sizeof(*w->expected));
	w->page_busy = calloc(PAGES, sizeof(*w->page_busy));
	pthread_mutex_init(&w->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&w->cond, &attr);
	pthread_condattr_destroy(&attr);
	for (uint32_t i = 0; i < DEPTH; i++) {
		w->slots[i].worker = w;
		w->slots[i].data = aligned_alloc(ISW_PAGE_BYTES, RUN_PAGES * ISW_PAGE_BYTES);
		CHECK(w->slots[i].data);
	}
}

static void worker_fini(struct worker *w)
{
	for (uint32_t i = 0; i < DEPTH; i++)
		free(w->slots[i].data);
	free(w->expected);
	free(w->page_busy);
	pthread_cond_destroy(&w->cond);
	pthread_mutex_destroy(&w->lock);
}

/* ---------------------------------------------------- what Python and a daemon do */

static struct isw_slab_info slab_of(struct world *w, uint32_t slab)
{
	struct isw_slab_info info;

	CHECK_EQ(isw_engine_slabs(w->engine, slab, 1, &info), 1);
	return info;
}

static struct isw_remote_config remote_config(const struct donor *d, const char *token)
{
	return (struct isw_remote_config){
		.host = "127.0.0.1",
		.port = d->port,
		.token = token,
		.queues = 2,
		.connect_ms_max = WAIT_MS,
		.request_ms_max = WAIT_MS,
		.export_bytes = SLABS * SLAB_PAGES * ISW_PAGE_BYTES,
	};
}

static void donor_start(struct world *w, struct donor *d)
{
	const struct isw_store_config config = {
		.slab_bytes = SLAB_PAGES * ISW_PAGE_BYTES,
		.slabs_max = SLABS,
		.leases_max = 4,
		.connections_max = 16,
		.connections_per_lease_max = 16,
		.handshake_ms_max = WAIT_MS,
		.send_ms_max = WAIT_MS,
	};
	char token[ISW_TOKEN_TEXT_BYTES];
	struct isw_remote_config remote;
	struct isw_error error = {0};

	CHECK_EQ(isw_store_create(&config, &d->store, &error), 0);
	CHECK_EQ(isw_store_listen(d->store, "127.0.0.1", 0, &d->port, &error), 0);
	for (uint32_t i = 0; i < SLABS / 2; i++)
		CHECK_EQ(isw_store_preallocate(d->store, &error), 0);
	CHECK_EQ(isw_store_lease_create(d->store, SLABS, token, &d->lease, &error), 0);
	remote = remote_config(d, token);
	CHECK_EQ(isw_remote_connect(w->engine, &remote, &d->remote, &error), 0);
}

static void map_slab(struct world *w, uint32_t slab)
{
	uint32_t number = below(&w->control_random, DONORS);
	struct donor *d = &w->donors[number];
	struct place *place = &w->places[w->mappings];
	int code;

	CHECK(w->mappings < PLACES);
	if (isw_store_map(d->store, d->lease, &place->slot, &place->generation))
		return; /* full */
	place->donor = number;
	code = isw_slab_map(w->engine, slab, d->remote, place->slot, w->mappings++);
	CHECK(code == 0 || code == -ENOTCONN);
	w->maps += !code;
	if (!code)
		return;
	CHECK_EQ(isw_store_unmap(d->store, d->lease, place->slot, place->generation, 0), 0);
	CHECK_EQ(isw_store_scrub(d->store), 0);
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
	char token[ISW_TOKEN_TEXT_BYTES];
	struct isw_remote_config remote;
	struct isw_error error = {0};
	int code;

	CHECK_EQ(isw_store_lease_renew(d->store, d->lease, WAIT_MS, token), 0);
	remote = remote_config(d, token);
	code = isw_remote_reconnect(w->engine, d->remote, &remote, &error);
	if (code)
		fprintf(stderr, "reconnect: %s\n", error.text);
	CHECK_EQ(code, 0);
	d->down = false;
	for (uint32_t i = 0; i < SLABS; i++) {
		struct isw_slab_info info = slab_of(w, i);

		if (info.state != ISW_SLAB_SUSPENDED || info.remote != d->remote)
			continue;
		if (!below(&w->control_random, 4)) {
			CHECK_EQ(isw_slab_unmap(w->engine, i, info.generation), 0);
			continue;
		}
		code = isw_slab_resume(w->engine, i, info.generation);
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
	char token[ISW_TOKEN_TEXT_BYTES];

	if (d->down)
		return;
	w->breaks++;
	if (below(&w->control_random, 2))
		CHECK_EQ(isw_remote_shutdown(w->engine, d->remote), 0);
	else /* from the donor's side: both ends notice at their own time */
		CHECK_EQ(isw_store_lease_renew(d->store, d->lease, WAIT_MS, token), 0);
}

static void control(struct world *w)
{
	uint32_t slab = below(&w->control_random, SLABS), what = below(&w->control_random, 40);
	struct isw_slab_info info = slab_of(w, slab);
	struct isw_remote_info remotes[DONORS];
	struct isw_engine_stats stats;

	if (info.state == ISW_SLAB_UNMAPPED && what < 30)
		map_slab(w, slab);
	else if (info.state == ISW_SLAB_MAPPED && what < 8)
		CHECK_EQ(isw_slab_unmap(w->engine, slab, info.generation), 0);
	else if (what == 39)
		break_donor(w, &w->donors[below(&w->control_random, DONORS)]);
	for (uint32_t i = 0; i < DONORS; i++)
		if (w->donors[i].down && what > 30)
			come_back(w, &w->donors[i]);
	take_events(w);
	CHECK_EQ(isw_engine_remotes(w->engine, DONORS, remotes), DONORS);
	isw_engine_stats(w->engine, &stats);
	CHECK(stats.requests_in_flight <= WORKERS * DEPTH);
	pause_ms(1 + below(&w->control_random, 3));
}

/* ------------------------------------------------------------------------- runs */

static char backup_path[4096];

/* In the first directory that takes direct I/O; false: none does. */
static bool engine_start(struct world *w)
{
	const char *directories[] = {".", getenv("TMPDIR"), "/var/tmp", "/tmp"};
	const struct isw_engine_config config = {
		.size_bytes = PAGES * ISW_PAGE_BYTES,
		.slab_bytes = SLAB_PAGES * ISW_PAGE_BYTES,
		.staging_pages = STAGING,
		.request_bytes_max = RUN_PAGES * ISW_PAGE_BYTES,
		.requests_max = WORKERS * DEPTH,
		.remotes_max = DONORS,
		.backup_write_bytes_max = 32 * ISW_PAGE_BYTES,
		.backup_writers = 2,
		.backup_readers = 2,
	};
	struct isw_error error = {0};

	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(directories); i++) {
		if (!directories[i])
			continue;
		snprintf(backup_path, sizeof(backup_path), "%s/isw-threads-%d.backup",
			 directories[i], (int)getpid());
		if (!isw_engine_create(&config, backup_path, &w->engine, &error))
			return true;
		fprintf(stderr, "%s\n", error.text);
		unlink(backup_path);
	}
	return false;
}

static void *end_stores(void *arg)
{
	struct world *w = arg;

	for (uint32_t i = 0; i < DONORS; i++)
		isw_store_destroy(w->donors[i].store);
	return NULL;
}

static void check_end(struct world *w, struct worker *workers)
{
	struct isw_engine_stats stats;
	uint64_t checked = 0;

	CHECK_EQ(isw_engine_settle(w->engine, WAIT_MS), 0);
	/* Every donor gone: all that is left is the backup, and it is enough. */
	for (uint32_t i = 0; i < DONORS; i++)
		CHECK_EQ(isw_remote_shutdown(w->engine, w->donors[i].remote), 0);
	for (uint32_t i = 0; i < WORKERS; i++)
		read_all(&workers[i], workers[i].first, workers[i].end);
	read_all(&workers[0], 0, SHARED_PAGES);
	isw_engine_stats(w->engine, &stats);
	for (uint32_t i = 0; i < WORKERS; i++)
		checked += workers[i].checked;
	printf("%llu pages checked: %llu from donors, %llu staged, %llu from the backup; "
	       "%llu waits; %u maps, %u unmaps, %u breaks, %u resumes\n",
	       (unsigned long long)checked, (unsigned long long)stats.pages_in_remote,
	       (unsigned long long)stats.pages_in_staging,
	       (unsigned long long)stats.pages_in_backup, (unsigned long long)stats.staging_waits,
	       w->maps, w->unmaps, w->breaks, w->resumes);
	CHECK_EQ(stats.requests_failed, 0);
	CHECK_EQ(stats.requests_in_flight, 0);
	CHECK_EQ(stats.staging_pages_used, 0);
	CHECK_EQ(stats.crc_errors_remote, 0); /* no rule may lean on the checksums */
	CHECK_EQ(stats.crc_errors_backup, 0);
	CHECK_EQ(stats.backup_errors, 0);
	/* The run was what it is meant to be. */
	CHECK(stats.pages_in_remote && stats.pages_in_backup && stats.pages_in_staging);
	CHECK(stats.staging_waits && w->maps && w->unmaps && w->breaks && w->resumes);
}

static void run(uint32_t run_ms, uint64_t seed)
{
	static struct world world;
	static struct worker workers[WORKERS];
	struct world *w = &world;
	uint64_t end_ns = iswi_now_ns() + run_ms * 1000000ull;
	pthread_t ender;

	w->control_random = seed;
	if (!engine_start(w))
		SKIP("no directory here takes direct I/O");
	for (uint32_t i = 0; i < DONORS; i++)
		donor_start(w, &w->donors[i]);
	for (uint32_t i = 0; i < WORKERS; i++) {
		worker_init(w, &workers[i], i, seed);
		CHECK_EQ(iswi_thread_start(&workers[i].thread, "worker", work, &workers[i]), 0);
	}
	while (iswi_now_ns() < end_ns)
		control(w);
	atomic_store_explicit(&w->stop, true, memory_order_relaxed);
	for (uint32_t i = 0; i < WORKERS; i++)
		pthread_join(workers[i].thread, NULL);
	take_events(w);
	for (uint32_t i = 0; i < DONORS; i++)
		if (w->donors[i].down)
			come_back(w, &w->donors[i]);
	check_end(w, workers);
	/* Both ends are taken down at once. */
	for (uint32_t i = 0; i < DONORS; i++)
		come_back(w, &w->donors[i]);
	CHECK_EQ(iswi_thread_start(&ender, "ender", end_stores, w), 0);
	isw_engine_destroy(w->engine);
	pthread_join(ender, NULL);
	for (uint32_t i = 0; i < WORKERS; i++)
		worker_fini(&workers[i]);
	unlink(backup_path);
}

int main(int argc, char **argv)
{
	uint32_t run_ms = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 3000;
	uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : iswi_now_ns() | 1;

	printf("seed %llu\n", (unsigned long long)seed);
	fflush(stdout);
	run(run_ms, seed);
	return 0;
}
