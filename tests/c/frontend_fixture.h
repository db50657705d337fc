/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine for tests of front ends: bytes in memory; requests end inside submit, or by a worker
 * thread in reverse order, or not before the test lets them go.
 */
#ifndef FRONTEND_FIXTURE_H
#define FRONTEND_FIXTURE_H

#include <pthread.h>
#include <string.h>

#include "check.h"
#include "engine/request.h"
#include "frontend/frontend.h"
#include "util/util.h"

#define MIB        (1u << 20)
#define SIZE_BYTES (64u * MIB)

/* MIXED: one of eight inside submit, the others as REVERSED. */
enum completion { INLINE, REVERSED, HELD, MIXED };

/* Read and written under the lock: a thread checker does not see the kernel's order. */
struct isw_engine {
	uint64_t size_bytes;
	uint32_t request_bytes_max, requests_max;
	char *bytes;

	pthread_mutex_t lock;
	pthread_cond_t changed;
	enum completion completion;
	struct iswi_req *queue; /* newest first */
	uint32_t in_flight, in_flight_max, submitted, connections_lost;
	uint32_t fua_writes, flushes, trims, zeros;
	uint32_t longest_bytes;
	struct iswi_req last; /* as it was submitted */
	bool stop, down;
	int down_error, fail_with;
	pthread_t worker;
};

static isw_engine engine;

uint64_t iswi_engine_size_bytes(const isw_engine *engine)
{
	return engine->size_bytes;
}

uint64_t iswi_engine_far_offset(const isw_engine *engine)
{
	return engine->size_bytes;
}

uint64_t iswi_engine_far_bytes(const isw_engine *engine)
{
	(void)engine;
	return 0;
}

uint64_t iswi_engine_slab_bytes(const isw_engine *engine)
{
	return engine->size_bytes;
}

bool iswi_engine_is_mapped(const isw_engine *engine, uint32_t slab)
{
	(void)engine;
	(void)slab;
	return false;
}

uint32_t iswi_engine_request_bytes_max(const isw_engine *engine)
{
	return engine->request_bytes_max;
}

uint32_t iswi_engine_requests_max(const isw_engine *engine)
{
	return engine->requests_max;
}

void iswi_engine_frontend_down(isw_engine *engine, int error)
{
	pthread_mutex_lock(&engine->lock);
	CHECK(!engine->down);
	engine->down = true;
	engine->down_error = error;
	pthread_cond_broadcast(&engine->changed);
	pthread_mutex_unlock(&engine->lock);
}

void iswi_engine_connection_lost(isw_engine *engine)
{
	pthread_mutex_lock(&engine->lock);
	engine->connections_lost++;
	pthread_mutex_unlock(&engine->lock);
}

static void finish(isw_engine *engine, struct iswi_req *req)
{
	char *place = engine->bytes + req->offset;
	int error;

	pthread_mutex_lock(&engine->lock);
	error = engine->fail_with;
	if (error == 0 && req->op == ISWI_READ)
		memcpy(req->data, place, req->length);
	else if (error == 0 && req->op == ISWI_WRITE)
		memcpy(place, req->data, req->length);
	else if (error == 0 && (req->op == ISWI_TRIM || req->op == ISWI_ZERO))
		memset(place, 0, req->length);
	engine->in_flight--;
	pthread_cond_broadcast(&engine->changed);
	pthread_mutex_unlock(&engine->lock);
	req->done(req, error);
}

static void count(isw_engine *engine, const struct iswi_req *req)
{
	engine->submitted++;
	engine->in_flight++;
	engine->in_flight_max = ISWI_MAX(engine->in_flight_max, engine->in_flight);
	CHECK(engine->in_flight <= engine->requests_max);
	engine->fua_writes += req->op == ISWI_WRITE && req->flags & ISWI_REQ_FUA;
	engine->flushes += req->op == ISWI_FLUSH;
	engine->trims += req->op == ISWI_TRIM;
	engine->zeros += req->op == ISWI_ZERO;
	engine->last.op = req->op;
	engine->last.flags = req->flags;
	engine->last.offset = req->offset;
	engine->last.length = req->length;
	if (req->op == ISWI_READ || req->op == ISWI_WRITE) {
		engine->longest_bytes = ISWI_MAX(engine->longest_bytes, (uint32_t)req->length);
		CHECK(req->length <= engine->request_bytes_max);
		CHECK_EQ((uintptr_t)req->data % ISW_PAGE_BYTES, 0);
	}
	CHECK_EQ(req->offset % ISW_PAGE_BYTES, 0);
	CHECK_EQ(req->length % ISW_PAGE_BYTES, 0);
	CHECK(req->offset + req->length <= engine->size_bytes);
}

void iswi_engine_submit(isw_engine *engine, struct iswi_req *req)
{
	pthread_mutex_lock(&engine->lock);
	count(engine, req);
	if (engine->completion != INLINE &&
	    (engine->completion != MIXED || engine->submitted % 8 != 0)) {
		req->next = engine->queue;
		engine->queue = req;
		pthread_cond_broadcast(&engine->changed);
		req = NULL;
	}
	pthread_mutex_unlock(&engine->lock);
	if (req)
		finish(engine, req);
}

void iswi_engine_submit_plugged(isw_engine *engine, struct iswi_req *req, struct iswi_plug *plug)
{
	(void)engine;
	/* Held back for good unless the front end unplugs. */
	plug->count++;
	req->next = (void *)plug->first;
	plug->first = (void *)req;
}

void iswi_engine_unplug(isw_engine *engine, struct iswi_plug *plug)
{
	struct iswi_req *req = (struct iswi_req *)(void *)plug->first;

	*plug = (struct iswi_plug){0};
	while (req) {
		struct iswi_req *next = req->next;

		iswi_engine_submit(engine, req);
		req = next;
	}
}

static void *worker(void *arg)
{
	isw_engine *engine = arg;

	for (;;) {
		struct iswi_req *req;

		pthread_mutex_lock(&engine->lock);
		while (!engine->stop && (!engine->queue || engine->completion == HELD))
			pthread_cond_wait(&engine->changed, &engine->lock);
		req = engine->queue;
		if (req)
			engine->queue = req->next;
		pthread_mutex_unlock(&engine->lock);
		if (!req)
			return NULL;
		finish(engine, req);
	}
}

/* On memory of the caller's. */
static inline void engine_start_on(char *bytes, uint64_t size_bytes, enum completion completion,
				   uint32_t requests_max)
{
	memset(&engine, 0, sizeof(engine));
	engine.size_bytes = size_bytes;
	engine.request_bytes_max = MIB;
	engine.requests_max = requests_max;
	engine.completion = completion;
	engine.bytes = bytes;
	pthread_mutex_init(&engine.lock, NULL);
	pthread_cond_init(&engine.changed, NULL);
	CHECK_EQ(iswi_thread_start(&engine.worker, "test-engine", worker, &engine), 0);
}

static inline void engine_start(enum completion completion, uint32_t requests_max)
{
	char *bytes = calloc(1, SIZE_BYTES);

	CHECK(bytes != NULL);
	engine_start_on(bytes, SIZE_BYTES, completion, requests_max);
}

static inline void engine_stop(void)
{
	pthread_mutex_lock(&engine.lock);
	CHECK_EQ(engine.in_flight, 0);
	engine.stop = true;
	pthread_cond_broadcast(&engine.changed);
	pthread_mutex_unlock(&engine.lock);
	pthread_join(engine.worker, NULL);
	pthread_cond_destroy(&engine.changed);
	pthread_mutex_destroy(&engine.lock);
	free(engine.bytes);
}

static inline void engine_complete(enum completion completion)
{
	pthread_mutex_lock(&engine.lock);
	engine.completion = completion;
	pthread_cond_broadcast(&engine.changed);
	pthread_mutex_unlock(&engine.lock);
}

static inline void engine_fail_with(int error)
{
	pthread_mutex_lock(&engine.lock);
	engine.fail_with = error;
	pthread_mutex_unlock(&engine.lock);
}

static inline uint32_t counted(const uint32_t *counter)
{
	uint32_t value;

	pthread_mutex_lock(&engine.lock);
	value = *counter;
	pthread_mutex_unlock(&engine.lock);
	return value;
}

#endif
