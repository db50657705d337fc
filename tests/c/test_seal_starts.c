/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many starts of a device that keeps its contents. Each has a key of its own, and there is room for
 * 64 of them, so pages of earlier starts are sealed again. A damaged page must stop no start.
 */
#define OWN_MAIN
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "engine_real.h"
#include "seal_fixture.h"
#include "tests.h"

#define PAGES      128u /* more than there is room for keys */
#define SHORT      120u /* pages of a backup that was cut off */
#define MARK       0x5ea1000000u
#define LOST       UINT64_MAX /* in place of a page's value: reading it is an error */
#define PAGE_BYTES ((size_t)ISW_PAGE_BYTES)

/* What outlives a stop, and what its pages hold by now. */
struct device {
	char backup[4096], tables[4096 + 8];
	uint64_t values[PAGES];
	uint32_t starts;
};

static struct device device_new(void)
{
	struct device d = {.starts = 0};

	find_backup("starts", d.backup, sizeof(d.backup));
	snprintf(d.tables, sizeof(d.tables), "%s.tables", d.backup);
	return d;
}

static void device_end(const struct device *d)
{
	unlink(d->backup);
	unlink(d->tables);
}

static isw_engine *created(struct device *d)
{
	const struct isw_engine_config config = {
		.size_bytes = PAGES * PAGE_BYTES,
		.slab_bytes = PAGES * PAGE_BYTES,
		.staging_pages = 64,
		.request_bytes_max = 8 * ISW_PAGE_BYTES,
		.requests_max = 64,
		.remotes_max = 1,
		.state_fd = -1,
		.backup_write_bytes_max = 4 * ISW_PAGE_BYTES,
		.backup_writers = 1,
		.backup_readers = 1,
		.flags = ISW_ENGINE_SEAL,
		.seal_key_fd = test_key_fd(),
	};
	struct isw_error error = {0};
	isw_engine *e;

	CHECK_OK(isw_engine_create(&config, d->backup, &e, &error), error);
	if (d->starts++)
		CHECK_OK(isw_engine_load_tables(e, d->tables, &error), error);
	return e;
}

/* The number of pages that could not be sealed again. */
static int sealed_anew(isw_engine *e)
{
	struct isw_error error = {0};
	int lost = isw_engine_seal_anew(e, &error);

	CHECK_OK(lost < 0, error);
	return lost;
}

static void write_page(struct device *d, isw_engine *e, uint32_t number, uint64_t value)
{
	static _Alignas(ISW_PAGE_BYTES) uint64_t page[ISW_PAGE_BYTES / 8];

	d->values[number] = page[5] = value;
	CHECK_EQ(ask_and_wait(e, ISWI_WRITE, number, 1, page), 0);
}

static void check_pages(const struct device *d, isw_engine *e)
{
	static _Alignas(ISW_PAGE_BYTES) uint64_t page[ISW_PAGE_BYTES / 8];

	for (uint32_t i = 0; i < PAGES; i++) {
		int error = ask_and_wait(e, ISWI_READ, i, 1, page);

		CHECK_EQ(error, d->values[i] == LOST ? -EIO : 0);
		CHECK_EQ(page[5], error ? 0 : d->values[i]);
	}
}

static void stop(const struct device *d, isw_engine *e)
{
	struct isw_error error = {0};

	CHECK_EQ(isw_engine_settle(e, REAL_WAIT_MS), 0);
	CHECK_OK(isw_engine_save_tables(e, d->tables, &error), error);
	isw_engine_destroy(e);
}

static uint32_t keys_in_use(const isw_engine *e)
{
	uint64_t pages[ISWI_EPOCHS];
	uint32_t count = 0;

	iswi_epochs_count(e, pages);
	for (uint32_t i = 0; i < ISWI_EPOCHS; i++)
		count += pages[i] > 0;
	return count;
}

/* One more start: all pages are what they were, and so many more are of this start. */
static int start_once(struct device *d, uint32_t number, uint32_t count)
{
	isw_engine *e = created(d);
	int lost = sealed_anew(e);

	check_pages(d, e);
	for (uint32_t i = 0; i < count; i++)
		write_page(d, e, (number + i) % PAGES, MARK * d->starts + i);
	CHECK(keys_in_use(e) < ISWI_EPOCHS);
	stop(d, e);
	return lost;
}

static void flip(const struct device *d, uint32_t page)
{
	off_t at = (off_t)(page * PAGE_BYTES) + 1234;
	int fd = open(d->backup, O_RDWR | O_CLOEXEC);
	unsigned char byte;

	CHECK(fd >= 0);
	CHECK_EQ(pread(fd, &byte, 1, at), 1);
	byte ^= 1;
	CHECK_EQ(pwrite(fd, &byte, 1, at), 1);
	CHECK_EQ(fsync(fd), 0);
	close(fd);
}

/* Each page of the device is of another start, and there are more starts than keys have room. */
TEST(a_device_is_started_more_often_than_there_is_room_for_keys)
{
	struct device d = device_new();

	for (uint32_t start = 0; start < 2 * PAGES + 2; start++)
		CHECK_EQ(start_once(&d, start % PAGES, 1), 0);
	device_end(&d);
}

/* Some were altered before their start's key gives its place up. */
TEST(a_page_that_does_not_open_stops_no_start)
{
	struct device d = device_new();
	int lost = 0;

	for (uint32_t start = 0; start < 10; start++)
		start_once(&d, start, 1);
	for (uint32_t page = 0; page < 10; page += 3) {
		flip(&d, page);
		d.values[page] = LOST;
	}
	for (uint32_t start = 10; start < PAGES; start++)
		lost += start_once(&d, start, 1);
	CHECK_EQ(lost, 4);
	/* What is written there now is there. */
	for (uint32_t start = 0; start < PAGES; start++)
		CHECK_EQ(start_once(&d, start, 1), 0);
	device_end(&d);
}

/* Its neighbours of the same start, read and written together with it, are sealed again. */
TEST(a_page_that_does_not_open_costs_no_other_page)
{
	struct device d = device_new();
	int lost = 0;

	start_once(&d, 0, 2);
	flip(&d, 1);
	d.values[1] = LOST;
	for (uint32_t start = 1; start < PAGES / 2; start++)
		lost += start_once(&d, 2 * start, 2);
	CHECK_EQ(lost, 1);
	CHECK_EQ(start_once(&d, 1, 1), 0);
	device_end(&d);
}

/* The page may be there when the disk has been mended, so another start's pages are taken. */
TEST(a_page_that_the_disk_does_not_read_is_not_given_up)
{
	static unsigned char kept[(PAGES - SHORT) * ISW_PAGE_BYTES];
	const off_t at = (off_t)(SHORT * PAGE_BYTES);
	struct device d = device_new();
	isw_engine *e;
	int fd;

	for (uint32_t start = 0; start < ISWI_EPOCHS - 1; start++)
		start_once(&d, PAGES - 1 - start, 1);
	fd = open(d.backup, O_RDWR | O_CLOEXEC);
	CHECK_EQ(pread(fd, kept, sizeof(kept), at), sizeof(kept));
	e = created(&d);
	CHECK_EQ(ftruncate(fd, at), 0);
	CHECK_EQ(sealed_anew(e), 0);
	CHECK_EQ(keys_in_use(e), ISWI_EPOCHS - 1);
	CHECK_EQ(pwrite(fd, kept, sizeof(kept), at), sizeof(kept));
	close(fd);
	check_pages(&d, e);
	stop(&d, e);
	device_end(&d);
}

TEST(a_disk_that_reads_nothing_is_an_error)
{
	struct device d = device_new();
	struct isw_error error = {0};
	isw_engine *e;

	for (uint32_t start = 0; start < ISWI_EPOCHS - 1; start++)
		start_once(&d, start, 1);
	e = created(&d);
	CHECK_EQ(truncate(d.backup, 0), 0);
	CHECK_EQ(isw_engine_seal_anew(e, &error), -EIO);
	CHECK(strstr(error.text, "sealed again"));
	isw_engine_destroy(e);
	device_end(&d);
}

/* However many keys it had while it ran. */
TEST(a_running_device_leaves_a_place_for_the_next_start)
{
	struct device d = device_new();
	isw_engine *e = created(&d);
	uint32_t keys = 1;

	write_page(&d, e, 0, MARK);
	for (; keys < ISWI_EPOCHS; keys++) {
		int code;

		atomic_fetch_add(&e->arena->next_nonce, ISWI_EPOCH_PAGES);
		code = isw_engine_seal_tend(e);
		if (code == -ENOSPC)
			break;
		CHECK_EQ(code, 1);
		write_page(&d, e, keys, MARK + keys);
	}
	CHECK_EQ(keys, ISWI_EPOCHS - 1);
	check_pages(&d, e);
	stop(&d, e);
	for (uint32_t start = 0; start < 4; start++)
		CHECK_EQ(start_once(&d, start, 1), 0);
	device_end(&d);
}

int main(void)
{
	if (!test_seal_flag())
		SKIP("no cryptographic library");
	return run_tests();
}
