/* SPDX-License-Identifier: Apache-2.0 */
/* A server with exports whose bytes lie in memory: "" and "disk". */
#ifndef ISW_TEST_NBD_MEMORY_FIXTURE_H
#define ISW_TEST_NBD_MEMORY_FIXTURE_H

#include "nbd_fixture.h"
#include "tests_between.h"
#include "util/util.h"
#include "wire/nbd_conn.h"
#include "wire/nbd_server.h"

#define EXPORT_BYTES (4u << 20)
#define BLOCK_MAX    (2u << 20)
#define BAD_FROM     (3u << 20) /* from here on hold fails */
#define PLACES       8u

static struct iswi_nbd_server *server;
static uint16_t port;
static char memory[EXPORT_BYTES];
static struct iswi_nbd_counters counters;
static atomic_int holds; /* relaxed: compared when nothing is in flight */
static atomic_int opens;

static int test_open(void *ctx, const char *name, size_t name_bytes, struct iswi_nbd_conn *conn,
		     struct iswi_nbd_export *export_out)
{
	(void)ctx;
	if (name_bytes != 0 && (name_bytes != 4 || memcmp(name, "disk", 4) != 0))
		return -ENOENT;
	export_out->size_bytes = EXPORT_BYTES;
	export_out->block_bytes_min = 512;
	export_out->block_bytes_preferred = 4096;
	export_out->block_bytes_max = BLOCK_MAX;
	export_out->handle = &counters;
	export_out->counters = &counters;
	atomic_fetch_add(&opens, conn != NULL);
	return 0;
}

static void test_close(void *ctx, struct iswi_nbd_export *export, struct iswi_nbd_conn *conn)
{
	(void)ctx, (void)conn;
	CHECK(export->handle == &counters);
	atomic_fetch_sub(&opens, 1);
}

static int test_hold(struct iswi_nbd_export *export, uint64_t offset, uint32_t length,
		     struct iswi_nbd_hold *hold_out)
{
	CHECK(export->handle == &counters);
	CHECK(length > 0 && offset + length <= EXPORT_BYTES);
	if (offset >= BAD_FROM)
		return -ENXIO;
	atomic_fetch_add(&holds, 1);
	hold_out->memory = memory + offset;
	hold_out->cookie = &holds;
	return 0;
}

static void test_release(struct iswi_nbd_export *export, struct iswi_nbd_hold *hold)
{
	CHECK(export->handle == &counters && hold->cookie == &holds);
	atomic_fetch_sub(&holds, 1);
}

static const struct iswi_nbd_backend secret_backend = {
	.open = test_open,
	.close = test_close,
	.hold = test_hold,
	.release = test_release,
};

static void set_up_with(const struct iswi_nbd_server_config *config)
{
	memset(&counters, 0, sizeof(counters));
	memset(memory, 0, sizeof(memory));
	CHECK_EQ(iswi_nbd_server_create(config, &server, NULL), 0);
	CHECK_EQ(iswi_nbd_server_listen_tcp(server, "127.0.0.1", 0, &port, NULL), 0);
	CHECK(port != 0);
}

static void tear_down(void)
{
	iswi_nbd_server_destroy(server);
	CHECK_EQ(atomic_load(&holds), 0);
	CHECK_EQ(atomic_load(&opens), 0);
}

static struct iswi_nbd_server_stats server_stats(void)
{
	struct iswi_nbd_server_stats stats;

	iswi_nbd_server_stats(server, &stats);
	return stats;
}

#endif
