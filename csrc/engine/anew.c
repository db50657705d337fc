/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sealing pages of earlier starts again. Each start of a device that keeps its contents has a key
 * of its own, and there is room for only so many: the key with the fewest pages gives its place up.
 * Its pages are read and written as any request's are, so a kill in between loses nothing. A page
 * that does not open is lost, as it was before; it must not keep the device from starting for good.
 */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>

#include "engine/engine.h"
#include "engine/state/seal.h"
#include "seal/seal.h"

#define RUN_PAGES_MAX 64u

struct waiter {
	struct iswi_req req; /* first: done gets its address */
	pthread_mutex_t lock;
	pthread_cond_t ended;
	bool has_ended;
	int error;
};

static void wake(struct iswi_req *req, int error)
{
	struct waiter *w = (struct waiter *)req;

	pthread_mutex_lock(&w->lock);
	w->has_ended = true;
	w->error = error;
	pthread_cond_signal(&w->ended);
	pthread_mutex_unlock(&w->lock);
}

static int run(struct isw_engine *e, enum iswi_req_op op, uint64_t page, uint32_t pages, void *data)
{
	struct waiter w = {
		.req = {.op = op,
			.offset = page * ISW_PAGE_BYTES,
			.length = (uint64_t)pages * ISW_PAGE_BYTES,
			.data = data,
			.done = wake},
		.lock = PTHREAD_MUTEX_INITIALIZER,
		.ended = PTHREAD_COND_INITIALIZER,
	};

	iswi_engine_submit(e, &w.req);
	pthread_mutex_lock(&w.lock);
	while (!w.has_ended)
		pthread_cond_wait(&w.ended, &w.lock);
	pthread_mutex_unlock(&w.lock);
	return w.error;
}

static bool is_of(const struct isw_engine *e, uint64_t page, uint32_t number)
{
	return page < e->pages && iswi_bit(e->backup_current, page) &&
	       iswi_epoch_of(iswi_seal_number(e, page)) == number;
}

/* -EIO: the page was not read. *lost: that is not the disk's fault, its bytes do not open. */
static int move(struct isw_engine *e, uint64_t page, uint32_t pages, void *buffer, bool *lost)
{
	uint64_t errors = atomic_load(&e->count.backup_errors);
	int code = run(e, ISWI_READ, page, pages, buffer);

	*lost = code && atomic_load(&e->count.backup_errors) == errors;
	return code ? code : run(e, ISWI_WRITE, page, pages, buffer);
}

/* One store, after which the page needs no key: nothing opens with this seal. */
static void give_up(struct isw_engine *e, uint64_t page)
{
	struct iswi_shard *shard = iswi_shard_of(e, page);

	pthread_mutex_lock(&shard->lock);
	iswi_keep64(&e->seals[page].number, ISWI_LOST_NUMBER);
	pthread_mutex_unlock(&shard->lock);
}

/* Raises *lost for each page that does not open. */
static int empty_epoch(struct isw_engine *e, uint32_t number, void *buffer, uint32_t *lost)
{
	uint32_t most = ISWI_MIN(RUN_PAGES_MAX, e->config.request_bytes_max / ISW_PAGE_BYTES);
	uint32_t next = most; /* pages of the next run: all, or one after the other */
	uint64_t page = 0;

	while (page < e->pages) {
		uint32_t pages = 0;
		bool is_lost = false;
		int code = 0;

		while (pages < next && is_of(e, page + pages, number))
			pages++;
		if (pages)
			code = move(e, page, pages, buffer, &is_lost);
		if (code && pages > 1) {
			next = 1;
			continue;
		}
		if (code && !is_lost)
			return code;
		if (is_lost) {
			give_up(e, page);
			++*lost;
		}
		page += pages ? pages : 1;
		if (page % most == 0)
			next = most;
	}
	return 0;
}

/*
 * The one with the fewest pages, but for that of now and those that were tried (a bit for each).
 * ISWI_EPOCHS: there is none, or one has no pages or no key.
 */
static uint32_t epoch_to_empty(const struct isw_engine *e, uint64_t tried)
{
	uint32_t now = iswi_epoch_of(iswi_kept64(&e->arena->next_nonce)), best = ISWI_EPOCHS;
	uint64_t pages[ISWI_EPOCHS];

	iswi_epochs_count(e, pages);
	for (uint32_t i = 0; i < ISWI_EPOCHS; i++) {
		if (!iswi_kept32(&e->arena->epochs[i].used) || (i != now && !pages[i]))
			return ISWI_EPOCHS;
		if (i != now && !(tried >> i & 1) &&
		    (best == ISWI_EPOCHS || pages[i] < pages[best]))
			best = i;
	}
	return best;
}

/* What the disk does not read now it may read another time: then another key gives its place up. */
static int make_room(struct isw_engine *e, void *buffer, uint32_t *lost)
{
	uint64_t tried = 0;
	int code = 0;

	for (;;) {
		uint32_t number = epoch_to_empty(e, tried);

		if (number == ISWI_EPOCHS)
			return code;
		code = empty_epoch(e, number, buffer, lost);
		if (!code)
			return 0;
		tried |= 1ull << number;
	}
}

int isw_engine_seal_anew(isw_engine *e, struct isw_error *error)
{
	const size_t bytes = RUN_PAGES_MAX * ISW_PAGE_BYTES;
	uint32_t lost = 0;
	void *buffer;
	int code;

	if (!iswi_sealed(e) || !e->has_backup || epoch_to_empty(e, 0) == ISWI_EPOCHS)
		return 0;
	buffer = aligned_alloc(ISW_PAGE_BYTES, bytes);
	if (!buffer)
		return iswi_error(error, -ENOMEM, "no memory for sealing pages again");
	code = make_room(e, buffer, &lost);
	iswi_seal_forget(buffer, bytes);
	free(buffer);
	return code ? iswi_error(error, code,
				 "pages of an earlier start cannot be read and sealed again; the "
				 "device's log says where the disk or the backup is damaged")
		    : (int)ISWI_MIN(lost, (uint32_t)INT_MAX);
}
