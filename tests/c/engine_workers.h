/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that keep an engine busy with pages they can verify: each has pages of its own, whose
 * contents it knows exactly, and some are written by all.
 */
#ifndef ISW_TEST_ENGINE_WORKERS_H
#define ISW_TEST_ENGINE_WORKERS_H

#include <errno.h>

#include "engine_real.h"

#define WORKERS      4u
#define SHARED_PAGES 64u /* the first ones, written by all; the rest is divided */
#define PAGES_MAX    1024u
#define DEPTH        6u
#define RUN_PAGES    8u
#define WAIT_MS      60000u

/* What the workers have in common. */
struct crowd {
	isw_engine *engine;
	uint64_t pages;   /* of the device; the rest is left alone */
	bool flushes;     /* also flush, and force writes out */
	atomic_bool stop; /* relaxed: joining orders the rest */
	/* Newest value of a shared page whose write each worker has seen complete; relaxed. */
	atomic_uint_fast64_t completed[WORKERS][SHARED_PAGES];
	struct worker *workers;
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
	struct crowd *crowd;
	uint32_t number;
	uint64_t random, values, checked;
	pthread_t thread;
	pthread_mutex_t lock; /* ended */
	pthread_cond_t cond;
	struct slot slots[DEPTH];
	uint64_t expected[PAGES_MAX]; /* what this worker wrote last */
	bool page_busy[PAGES_MAX];    /* part of a request of its own in flight */
	uint64_t first, end;          /* own pages */
};

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
			atomic_store_explicit(&w->crowd->completed[w->number][page],
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
	if (w->crowd->flushes && op == ISWI_WRITE && !below(&w->random, 300))
		slot->req.flags = ISWI_REQ_FUA;
	for (uint32_t i = 0; op != ISWI_FLUSH && i < pages; i++) {
		w->page_busy[page + i] = true;
		if (op == ISWI_WRITE)
			fill(w, slot, page + i, i);
		else if (op != ISWI_READ && page >= SHARED_PAGES)
			w->expected[page + i] = 0;
		for (uint32_t k = 0; page < SHARED_PAGES && k < WORKERS; k++)
			slot->floor[k][i] = atomic_load_explicit(&w->crowd->completed[k][page + i],
								 memory_order_relaxed);
	}
	iswi_engine_submit(w->crowd->engine, &slot->req);
}

static void random_request(struct worker *w, struct slot *slot)
{
	static const enum iswi_req_op ops[] = {ISWI_READ,  ISWI_READ,  ISWI_READ,  ISWI_READ,
					       ISWI_WRITE, ISWI_WRITE, ISWI_WRITE, ISWI_WRITE,
					       ISWI_WRITE, ISWI_TRIM,  ISWI_ZERO};
	bool shared = !below(&w->random, 6);
	uint64_t first = shared ? 0 : w->first, end = shared ? SHARED_PAGES : w->end, page;
	uint32_t pages = below(&w->random, 3) ? 1 : 1 + below(&w->random, RUN_PAGES);

	if (w->crowd->flushes && !below(&w->random, 1000)) {
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

/* Reads with a trend, of what is written meanwhile. */
static void scan(struct worker *w)
{
	for (uint64_t page = w->first; page < w->end;) {
		struct slot *slot = collect(w, false);
		uint32_t pages = 0, pages_max = 1 + below(&w->random, RUN_PAGES);

		while (pages < pages_max && page + pages < w->end && !w->page_busy[page + pages])
			pages++;
		if (pages)
			submit(w, slot, ISWI_READ, page, pages);
		page += ISWI_MAX(pages, 1);
		if (!below(&w->random, 3))
			random_request(w, collect(w, false));
	}
}

static void *work(void *arg)
{
	struct worker *w = arg;

	while (!atomic_load_explicit(&w->crowd->stop, memory_order_relaxed)) {
		random_request(w, collect(w, false));
		if (!below(&w->random, 100))
			scan(w);
	}
	collect(w, true);
	read_all(w, w->first, w->end);
	return NULL;
}

static void worker_start(struct crowd *crowd, uint32_t number, uint64_t seed)
{
	struct worker *w = &crowd->workers[number];
	uint64_t own = (crowd->pages - SHARED_PAGES) / WORKERS;
	pthread_condattr_t attr;

	w->crowd = crowd;
	w->number = number;
	w->random = seed * 77 + number + 1;
	w->first = SHARED_PAGES + number * own;
	w->end = w->first + own;
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
	CHECK_EQ(iswi_thread_start(&w->thread, "worker", work, w), 0);
}

static void crowd_start(struct crowd *crowd, isw_engine *engine, uint64_t seed, uint64_t pages,
			bool flushes)
{
	memset(crowd, 0, sizeof(*crowd));
	crowd->engine = engine;
	crowd->pages = pages;
	crowd->flushes = flushes;
	CHECK(crowd->pages <= PAGES_MAX);
	crowd->workers = calloc(WORKERS, sizeof(*crowd->workers));
	CHECK(crowd->workers);
	for (uint32_t i = 0; i < WORKERS; i++)
		worker_start(crowd, i, seed);
}

/* Each checks its pages once more before it ends. */
static void crowd_stop(struct crowd *crowd)
{
	atomic_store_explicit(&crowd->stop, true, memory_order_relaxed);
	for (uint32_t i = 0; i < WORKERS; i++)
		pthread_join(crowd->workers[i].thread, NULL);
}

/* On the caller's thread, after the stop: every page. Returns how many were checked in all. */
static uint64_t crowd_check(struct crowd *crowd)
{
	uint64_t checked = 0;

	read_all(&crowd->workers[0], 0, SHARED_PAGES);
	for (uint32_t i = 0; i < WORKERS; i++) {
		struct worker *w = &crowd->workers[i];

		read_all(w, w->first, w->end);
		checked += w->checked;
	}
	return checked;
}

static void crowd_free(struct crowd *crowd)
{
	for (uint32_t i = 0; i < WORKERS; i++) {
		struct worker *w = &crowd->workers[i];

		for (uint32_t k = 0; k < DEPTH; k++)
			free(w->slots[k].data);
		pthread_cond_destroy(&w->cond);
		pthread_mutex_destroy(&w->lock);
	}
	free(crowd->workers);
}

#endif
