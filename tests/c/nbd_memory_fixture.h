/* SPDX-License-Identifier: Apache-2.0 */
/* A server with exports whose bytes lie in memory: "" and "disk", and "busy", which is always full.
 */
#ifndef ISW_TEST_NBD_MEMORY_FIXTURE_H
#define ISW_TEST_NBD_MEMORY_FIXTURE_H

#include "nbd_fixture.h"
#include "util/util.h"
#include "wire/nbd_conn.h"
#include "wire/nbd_server.h"

#define EXPORT_BYTES (4u << 20)
#define BLOCK_MAX    (2u << 20)
#define BAD_FROM     (3u << 20) /* from here on hold fails */
#define PLACES       8u

struct fixture {
	struct iswi_nbd_server *server;
	uint16_t port;
	char *memory;
	struct iswi_nbd_counters counters;
	atomic_int holds; /* relaxed: compared when nothing is in flight */
	atomic_int opens;
	atomic_int hammers;
};

static int test_open(void *ctx, const char *name, size_t name_bytes, struct iswi_nbd_conn *conn,
		     struct iswi_nbd_export *export_out)
{
	struct fixture *f = ctx;

	if (name_bytes == 4 && memcmp(name, "busy", 4) == 0)
		return -EMFILE;
	if (name_bytes != 0 && (name_bytes != 4 || memcmp(name, "disk", 4) != 0))
		return -ENOENT;
	export_out->size_bytes = EXPORT_BYTES;
	export_out->block_bytes_min = 512;
	export_out->block_bytes_preferred = 4096;
	export_out->block_bytes_max = BLOCK_MAX;
	export_out->handle = f;
	export_out->counters = &f->counters;
	atomic_fetch_add(&f->opens, conn != NULL);
	return 0;
}

static void test_close(void *ctx, struct iswi_nbd_export *export, struct iswi_nbd_conn *conn)
{
	struct fixture *f = ctx;

	(void)conn;
	CHECK(export->handle == f);
	atomic_fetch_sub(&f->opens, 1);
}

static int test_hold(struct iswi_nbd_export *export, uint64_t offset, uint32_t length,
		     struct iswi_nbd_hold *hold_out)
{
	struct fixture *f = export->handle;

	CHECK(length > 0 && offset + length <= EXPORT_BYTES);
	if (offset >= BAD_FROM)
		return -ENXIO;
	atomic_fetch_add(&f->holds, 1);
	hold_out->memory = f->memory + offset;
	hold_out->cookie = f;
	return 0;
}

static void test_release(struct iswi_nbd_export *export, struct iswi_nbd_hold *hold)
{
	CHECK(hold->cookie == export->handle);
	atomic_fetch_sub(&((struct fixture *)export->handle)->holds, 1);
}

static const struct iswi_nbd_backend secret_backend = {
	.open = test_open,
	.close = test_close,
	.hold = test_hold,
	.release = test_release,
};

static void set_up_with(struct fixture *f, const struct iswi_nbd_server_config *config)
{
	struct iswi_nbd_server_config whole = *config;

	memset(f, 0, sizeof(*f));
	whole.ctx = f;
	f->memory = calloc(1, EXPORT_BYTES);
	CHECK(f->memory != NULL);
	CHECK_EQ(iswi_nbd_server_create(&whole, &f->server, NULL), 0);
	CHECK_EQ(iswi_nbd_server_listen_tcp(f->server, "127.0.0.1", 0, &f->port, NULL), 0);
	CHECK(f->port != 0);
}

static void tear_down(struct fixture *f)
{
	iswi_nbd_server_destroy(f->server);
	CHECK_EQ(atomic_load(&f->holds), 0);
	CHECK_EQ(atomic_load(&f->opens), 0);
	free(f->memory);
}

static struct iswi_nbd_server_stats stats_of(struct fixture *f)
{
	struct iswi_nbd_server_stats stats;

	iswi_nbd_server_stats(f->server, &stats);
	return stats;
}

#endif
