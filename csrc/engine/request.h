/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a front end sees of the engine: requests in, completions out. A front end includes this
 * and never a transport's header.
 */
#ifndef ISWI_REQUEST_H
#define ISWI_REQUEST_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "isw.h"

/* CONFIRM: a read of these pages would find them now; else -EIO. Moves no bytes. */
enum iswi_req_op { ISWI_READ, ISWI_WRITE, ISWI_TRIM, ISWI_ZERO, ISWI_FLUSH, ISWI_CONFIRM };

#define ISWI_REQ_FUA 0x1
/*
 * Of the front end far: in its range alone. It bounds itself, and has its own part of staging. A
 * read of a page that no source will ever have is -ENODATA, not -EIO: no donor and no backup has
 * it, or what each of them gave was read twice and is not what was written, or the backup's medium
 * has lost it. -EIO is any other failure: a later try may succeed.
 */
#define ISWI_REQ_FAR 0x2

/* Of requests with that flag: the largest, and how many reads of them there are at once. */
#define ISWI_FAR_REQUEST_BYTES_MAX (2u << 20)
#define ISWI_FAR_READS_MAX         4u

/*
 * One block request. The front end owns the memory, of which it has at most requests_max, made
 * before it serves; the engine borrows it, and data, from submit until done.
 */
struct iswi_req {
	/* Set by the front end before submit. */
	enum iswi_req_op op;
	uint32_t flags;
	uint64_t offset; /* bytes; a multiple of ISW_PAGE_BYTES, else -EINVAL */
	/* Bytes; likewise. READ and WRITE: at most request_bytes_max (far: see below). */
	uint64_t length;
	void *data; /* READ: aligned to ISW_PAGE_BYTES, filled; WRITE: any alignment */
	/*
	 * READ: the pages come here, and data is for what they come out of; NULL: they come in
	 * data. Of this memory nothing is read: others may write there, and spoil what comes alone.
	 */
	void *opened;
	/*
	 * Exactly once, on any thread (also inside submit), no engine lock held; error is 0 or a
	 * negative errno. It must not wait: it runs on the threads that move pages. It may submit,
	 * but what ends inside submit then nests, so not again and again on these small stacks.
	 */
	void (*done)(struct iswi_req *req, int error);

	/* The engine's own. */
	atomic_uint pending; /* pages (and one guard while submitting) not yet safe or filled */
	atomic_int error;
	atomic_bool waited; /* READ: for a donor or the disk. Relaxed, ordered as error is */
	uint64_t start_ns;
	uint64_t cursor; /* first page of a write not yet staged */
	void (*then)(isw_engine *engine, struct iswi_req *req); /* NULL, or before done */
	struct iswi_req *next;
};

/*
 * Transfers held back while more requests are waiting, so that all of them leave in one send. A
 * front end's thread has one, zeroed, and unplugs it before it waits for anything.
 */
struct iswi_op;
struct iswi_plug {
	struct iswi_op *first, *last;
	uint32_t count;
};

/*
 * Any thread; never waits. A write that finds no free staging buffer is kept and goes on later:
 * its data must stay in place until done in any case. -EBUSY through done when more than
 * requests_max are in flight.
 */
void iswi_engine_submit(isw_engine *engine, struct iswi_req *req);
/*
 * The same, with its transfers held back in plug, unless nothing else is in flight: a lone
 * request does not wait for company. The request may have ended before this returns, or not begin
 * before unplug.
 */
void iswi_engine_submit_plugged(isw_engine *engine, struct iswi_req *req, struct iswi_plug *plug);
/* Sends the transfers that are held back. */
void iswi_engine_unplug(isw_engine *engine, struct iswi_plug *plug);
static inline bool iswi_plug_is_empty(const struct iswi_plug *plug)
{
	return plug->first == NULL;
}

/* Of the block device; the far range follows it, from the next slab's border on. */
uint64_t iswi_engine_size_bytes(const isw_engine *engine);
uint64_t iswi_engine_far_offset(const isw_engine *engine);
uint64_t iswi_engine_far_bytes(const isw_engine *engine);
uint64_t iswi_engine_slab_bytes(const isw_engine *engine);
/* Whether writes to that slab go to a donor now. Any thread, never waits. */
bool iswi_engine_is_mapped(const isw_engine *engine, uint32_t slab);
uint32_t iswi_engine_request_bytes_max(const isw_engine *engine);
uint32_t iswi_engine_requests_max(const isw_engine *engine);
/* For a front end of several connections, one of which has ended: ISW_EVENT_CONNECTION_LOST. */
void iswi_engine_connection_lost(isw_engine *engine);
/*
 * For a front end that ended without being asked (unmounted, device gone): ISW_EVENT_FRONTEND_DOWN.
 */
void iswi_engine_frontend_down(isw_engine *engine, int error);

#endif
