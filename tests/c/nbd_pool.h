/* SPDX-License-Identifier: Apache-2.0 */
/* The requests of an asynchronous backend, and what its callbacks count. */
#ifndef ISW_TEST_NBD_POOL_H
#define ISW_TEST_NBD_POOL_H

#include "nbd_fixture.h"
#include "tests_between.h"
#include "util/util.h"
#include "wire/nbd_server.h"

#define EXPORT_BYTES (1u << 20)
#define BLOCK_MAX    65536u
#define REQUESTS     16u

static struct pool {
	struct iswi_nbd_request requests[REQUESTS];
	pthread_mutex_t lock;
	pthread_cond_t changed;
	/* Under lock. */
	struct iswi_nbd_request *free;
	unsigned free_count;
	unsigned opens; /* connections that are open */
} pool;

static void pool_put(struct iswi_nbd_request *request)
{
	pthread_mutex_lock(&pool.lock);
	request->next = pool.free;
	pool.free = request;
	pool.free_count++;
	pthread_cond_broadcast(&pool.changed);
	pthread_mutex_unlock(&pool.lock);
}

/* Lock held; waits until there is one. */
static struct iswi_nbd_request *pool_take(void)
{
	struct iswi_nbd_request *request;

	while (pool.free == NULL)
		pthread_cond_wait(&pool.changed, &pool.lock);
	request = pool.free;
	pool.free = request->next;
	pool.free_count--;
	return request;
}

static void pool_make(void)
{
	memset(&pool, 0, sizeof(pool));
	pthread_mutex_init(&pool.lock, NULL);
	pthread_cond_init(&pool.changed, NULL);
	for (unsigned i = 0; i < REQUESTS; i++) {
		pool.requests[i].data = malloc(BLOCK_MAX);
		CHECK(pool.requests[i].data != NULL);
		pool_put(&pool.requests[i]);
	}
}

/* The server is gone: everything came back. */
static void pool_free(void)
{
	CHECK_EQ(pool.free_count, REQUESTS);
	CHECK_EQ(pool.opens, 0);
	for (unsigned i = 0; i < REQUESTS; i++)
		free(pool.requests[i].data);
	pthread_cond_destroy(&pool.changed);
	pthread_mutex_destroy(&pool.lock);
}

static void pool_open(struct iswi_nbd_export *export_out)
{
	pthread_mutex_lock(&pool.lock);
	pool.opens++;
	pthread_mutex_unlock(&pool.lock);
	export_out->size_bytes = EXPORT_BYTES;
	export_out->block_bytes_min = export_out->block_bytes_preferred = 4096;
	export_out->block_bytes_max = BLOCK_MAX;
}

/* A backend's. */
static void pool_close(void *ctx, struct iswi_nbd_export *export, struct iswi_nbd_conn *conn)
{
	(void)ctx, (void)export, (void)conn;
	pthread_mutex_lock(&pool.lock);
	pool.opens--;
	pthread_mutex_unlock(&pool.lock);
}

/* A backend's. */
static void pool_give(struct iswi_nbd_export *export, struct iswi_nbd_request *request)
{
	(void)export;
	pool_put(request);
}

static unsigned look(const unsigned *field)
{
	unsigned value;

	pthread_mutex_lock(&pool.lock);
	value = *field;
	pthread_mutex_unlock(&pool.lock);
	return value;
}

static void await_open(unsigned connections)
{
	WAIT_FOR(look(&pool.opens) == connections);
}

/* Changes something that others wait for. */
static void pool_set(bool *field, bool value)
{
	pthread_mutex_lock(&pool.lock);
	*field = value;
	pthread_cond_broadcast(&pool.changed);
	pthread_mutex_unlock(&pool.lock);
}

#endif
