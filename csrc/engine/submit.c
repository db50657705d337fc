/* SPDX-License-Identifier: Apache-2.0 */
/* A request's way into the engine. */
#include <errno.h>

#include "engine/ops/ops.h"

/* As many as a transport sends at once, or nearly: holding back more would gain nothing. */
#define PLUG_OPS_MAX 32u

uint64_t iswi_engine_size_bytes(const isw_engine *engine)
{
	return engine->config.size_bytes - engine->config.far_bytes;
}

uint64_t iswi_engine_far_offset(const isw_engine *engine)
{
	uint64_t slab_bytes = engine->config.slab_bytes;

	return (iswi_engine_size_bytes(engine) + slab_bytes - 1) / slab_bytes * slab_bytes;
}

uint64_t iswi_engine_far_bytes(const isw_engine *engine)
{
	uint64_t offset = iswi_engine_far_offset(engine);

	return engine->config.size_bytes > offset ? engine->config.size_bytes - offset : 0;
}

uint64_t iswi_engine_slab_bytes(const isw_engine *engine)
{
	return engine->config.slab_bytes;
}

bool iswi_engine_is_mapped(const isw_engine *engine, uint32_t slab)
{
	const struct iswi_slab *s = &engine->slabs[slab];

	return iswi_place_state(&s->places[atomic_load(&s->current)]) == ISW_SLAB_MAPPED;
}

uint32_t iswi_engine_request_bytes_max(const isw_engine *engine)
{
	return engine->config.request_bytes_max;
}

uint32_t iswi_engine_requests_max(const isw_engine *engine)
{
	return engine->config.requests_max;
}

void iswi_engine_frontend_down(isw_engine *engine, int error)
{
	iswi_events_put(&engine->events, &(struct isw_event){
						 .kind = ISW_EVENT_FRONTEND_DOWN,
						 .code = error,
					 });
}

void iswi_engine_connection_lost(isw_engine *engine)
{
	iswi_events_put(&engine->events, &(struct isw_event){.kind = ISW_EVENT_CONNECTION_LOST});
}

static int check(const struct isw_engine *e, const struct iswi_req *req)
{
	bool far = req->flags & ISWI_REQ_FAR;
	uint64_t begin = far ? iswi_engine_far_offset(e) : 0;
	uint64_t end = far ? e->config.size_bytes : iswi_engine_size_bytes(e);

	if (req->op == ISWI_FLUSH)
		return 0;
	if (req->offset % ISW_PAGE_BYTES || req->length % ISW_PAGE_BYTES)
		return -EINVAL;
	/* Neither range is reached from the other's front ends. */
	if (req->offset < begin || req->offset > end || req->length > end - req->offset)
		return -ENOSPC;
	if (req->op == ISWI_READ || req->op == ISWI_WRITE) {
		if (req->length > (far ? ISWI_FAR_REQUEST_BYTES_MAX : e->config.request_bytes_max))
			return -EINVAL;
		if (req->op == ISWI_READ && (uintptr_t)req->data % ISW_PAGE_BYTES)
			return -EINVAL;
	}
	return 0;
}

/* The load is all that a busy device pays. Pair: isw_engine_report_use. */
static void tell_of_use(struct isw_engine *e)
{
	if (atomic_load_explicit(&e->report_use, memory_order_relaxed) &&
	    atomic_exchange(&e->report_use, false))
		iswi_events_put(&e->events, &(struct isw_event){.kind = ISW_EVENT_USED});
}

static void submit(struct isw_engine *e, struct iswi_req *req, struct iswi_plug *plug)
{
	int code = check(e, req);
	uint64_t others;

	/*
	 * Forced unit access is a write and the flush after it; O_DSYNC sets it on the others, too.
	 */
	req->then = req->flags & ISWI_REQ_FUA && req->op != ISWI_FLUSH && req->op != ISWI_READ
			    ? iswi_flush
			    : NULL;
	req->next = NULL;
	req->start_ns = e->clock->now_ns(e->clock->ctx);
	atomic_init(&req->error, code);
	atomic_init(&req->waited, false);
	atomic_init(&req->pending, 1);
	others = atomic_fetch_add_explicit(&e->count.in_flight, 1, memory_order_acquire);
	if (!(req->flags & ISWI_REQ_FAR) &&
	    atomic_fetch_add_explicit(&e->count.block_in_flight, 1, memory_order_acquire) >=
		    e->config.requests_max)
		code = -EBUSY;
	if (!others)
		plug = NULL;
	if (code || (!req->length && req->op != ISWI_FLUSH)) {
		atomic_init(&req->error, code);
		iswi_req_put(e, req);
		return;
	}
	if (req->op == ISWI_READ || req->op == ISWI_WRITE)
		tell_of_use(e);
	switch (req->op) {
	case ISWI_READ:
		iswi_count(&e->count.read_requests, 1);
		iswi_read(e, req, plug);
		break;
	case ISWI_WRITE:
		iswi_count(&e->count.write_requests, 1);
		iswi_write(e, req, plug);
		break;
	case ISWI_TRIM:
		iswi_count(&e->count.trim_requests, 1);
		iswi_zero(e, req);
		break;
	case ISWI_ZERO:
		iswi_count(&e->count.zero_requests, 1);
		iswi_zero(e, req);
		break;
	case ISWI_FLUSH:
		iswi_count(&e->count.flush_requests, 1);
		iswi_flush(e, req);
		break;
	case ISWI_CONFIRM:
		iswi_confirm(e, req);
		break;
	}
}

void iswi_engine_submit(isw_engine *e, struct iswi_req *req)
{
	submit(e, req, NULL);
}

void iswi_engine_submit_plugged(isw_engine *e, struct iswi_req *req, struct iswi_plug *plug)
{
	submit(e, req, plug);
	if (plug->count >= PLUG_OPS_MAX)
		iswi_engine_unplug(e, plug);
}

void iswi_engine_unplug(isw_engine *e, struct iswi_plug *plug)
{
	struct iswi_op *first = plug->first;

	*plug = (struct iswi_plug){0};
	if (first)
		iswi_remote_submit(e, first);
}
